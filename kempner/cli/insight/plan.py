"""`kempner plan`: what a run will need, and how fast it will be, before it is queued."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.config import TAKES_OVERRIDES
from kempner.cli.insight.experts import divide
from kempner.cli.progress import busy
from kempner.cli.usage.words import overrides
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.data.files.index import read_index
from kempner.data.files.requirements import vocabulary
from kempner.model.spec.hardware import DEFAULTS, GPUS, Assumptions, find_gpu
from kempner.model.spec.mesh import ranks_on_a_node, resolve_mesh
from kempner.run.output.units import count
from kempner.run.process.exit_codes import DataError, ExitCode, UsageError

_DAY = 86_400


def register(app: typer.Typer) -> None:
    """Adds `plan` to `app`."""
    app.command(context_settings=TAKES_OVERRIDES)(plan)


def plan(
    context: typer.Context,
    file: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|MODEL",
            help="Configuration in TOML; or a Hugging Face model: its folder or config.json.",
        ),
    ],
    world: Annotated[int, typer.Option(min=1, help="Number of ranks, one for each GPU.")],
    nodes: Annotated[
        int | None, typer.Option(min=1, help="Nodes that they are on; by default 8 ranks on each.")
    ] = None,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    network_gbps: Annotated[
        float,
        typer.Option(min=0.001, help="Gbit/s that a node sends to others, its adapters together."),
    ] = 8 * DEFAULTS.network / 1e9,
    storage_rate: Annotated[
        float, typer.Option(min=0.001, help="GB/s at which all ranks together write a checkpoint.")
    ] = DEFAULTS.storage / 1e9,
    node_failure_days: Annotated[
        float, typer.Option(min=0.001, help="Days between two failures of one node.")
    ] = DEFAULTS.node_failure / _DAY,
    efficiency: Annotated[
        float,
        typer.Option(
            min=0.01, max=1, help="Share of the GPU's peak that products of matrices get."
        ),
    ] = DEFAULTS.compute_share,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say what memory a rank will need, what it will send, how long a step will take and why.

    CONFIG, then --section.key=value. The training step itself is run, without memory and without
    the other ranks; no GPU is needed. Of a MODEL with a mixture of experts, for a program of your
    own, the memory is told by the degree of expert parallelism. Exits with 1 if the memory of a GPU
    is not enough.
    """
    if file.is_dir() or file.suffix == ".json":
        if context.args:
            raise UsageError(f"{context.args[0]} has no effect on a MODEL: --world and --gpu do")
        return divide(file, world, gpu, as_json)
    config = load(file, overrides(context, file))
    # What cannot be is said before torch is imported.
    find_gpu(gpu)
    resolve_mesh(config, world)
    ranks_on_a_node(config, world, nodes)
    vocab_size = _vocabulary(config)
    # Nothing is computed: more threads would only take memory.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with busy("importing torch"):
        from kempner.training.plan.plan import plan as make
        from kempner.training.plan.words import to_json, to_text

    assumptions = Assumptions(
        network=network_gbps * 1e9 / 8,
        storage=storage_rate * 1e9,
        node_failure=node_failure_days * _DAY,
        compute_share=efficiency,
    )
    with busy(f"tracing a training step of one of {count(world, 'rank')}"):
        made = make(config, world, nodes, gpu, vocab_size=vocab_size, assumptions=assumptions)
    typer.echo(json.dumps(to_json(made), indent=2) if as_json else to_text(made))
    return ExitCode.COMPLETED if made.fits else ExitCode.CRASHED


def _vocabulary(config: Config) -> int:
    """As configured, else that of the data. Raises `DataError` if neither says it."""
    if config.model.vocab_size is not None:
        return config.model.vocab_size
    try:
        return vocabulary(config, read_index(Path(config.data.dataset_path)))
    except DataError as error:
        raise DataError(
            f"data.dataset_path={config.data.dataset_path}: {error}; or set model.vocab_size"
        ) from error
