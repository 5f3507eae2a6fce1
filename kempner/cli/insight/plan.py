"""`kempner plan`: memory and speed of a run before it is queued; `kempner plan MODEL`: memory of a
mixture of experts by the degree of expert parallelism."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.config import TAKES_OVERRIDES
from kempner.cli.progress import busy
from kempner.cli.usage import overrides
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.data.files.index import read_index, vocabulary
from kempner.model.spec.mesh import ranks_on_a_node, resolve_mesh
from kempner.model.spec.step_time import DEFAULTS, GPUS, Assumptions, GpuModel, find_gpu
from kempner.run.output.units import count
from kempner.run.process.exit_codes import DataError, ExitCode, UsageError
from kempner.training.plan.experts import Division, ExpertModel, divide_experts, fits

app = typer.Typer(rich_markup_mode=None)


def divide(model: Path, world: int, gpu: str, as_json: bool, refused: Sequence[str] = ()) -> int:
    """Print the memory of a rank by the degree of expert parallelism; returns the exit code.
    `model` is the config.json of a Hugging Face model, or its folder; `refused` are options that
    only a configuration takes."""
    if refused:
        raise UsageError(f"{refused[0]} has no effect on a MODEL: --world and --gpu do")
    card = find_gpu(gpu)
    with busy("importing torch and building the model without its weights"):
        from kempner.training.plan.experts import count_experts

        counted = count_experts(model)
    ways = divide_experts(counted, world)
    if as_json:
        typer.echo(json.dumps(_to_json(counted, ways, card), indent=2))
    else:
        typer.echo(_to_text(counted, ways, card, world))
    possible = any(fits(way.weights, card.memory) for way in ways)
    return ExitCode.COMPLETED if possible else ExitCode.CRASHED


def _to_json(model: ExpertModel, ways: Sequence[Division], gpu: GpuModel) -> dict[str, object]:
    rows = []
    for way in ways:
        needs = {"weights": way.weights, "sharded": way.sharded, "whole": way.whole}
        fitting = {name: fits(size, gpu.memory) for name, size in needs.items()}
        rows.append({**asdict(way), "fits": fitting})
    return {"model": asdict(model), "gpu": gpu.name, "ways": rows}


def _to_text(model: ExpertModel, ways: Sequence[Division], gpu: GpuModel, world: int) -> str:
    lines = [
        f"{model.parameters / 1e9:,.1f} billion parameters, {model.expert_parameters / 1e9:,.1f} "
        f"billion of them in experts: {model.experts} in a layer, {model.layers} layers",
        f"{count(world, 'rank')}, one {gpu.name} of {gpu.memory / 1e9:.0f} GB each. GB of a rank, "
        "without activations and caches; * fits",
        "",
        f"{'EP':>5}{'experts':>9}{'bf16 weights':>15}{'training, sharded':>20}"
        f"{'training, whole':>18}",
    ]
    for way in ways:
        row = f"{way.expert_parallel:>5}{way.experts:>9}"
        for width, size in ((15, way.weights), (20, way.sharded), (18, way.whole)):
            mark = "*" if fits(size, gpu.memory) else " "
            row += f"{size / 1e9:>{width - 1},.1f}{mark}"
        lines.append(row.rstrip())
    return "\n".join(lines)


_DAY = 86_400


FileArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CONFIG|MODEL",
        help="Configuration in TOML; or a Hugging Face model: its folder or config.json.",
    ),
]
NodesOption = Annotated[
    int | None, typer.Option(min=1, help="Nodes that they are on; by default 8 ranks on each.")
]
NetworkGbpsOption = Annotated[
    float,
    typer.Option(min=0.001, help="Gbit/s that a node sends to others, its adapters together."),
]
StorageRateOption = Annotated[
    float, typer.Option(min=0.001, help="GB/s at which all ranks together write a checkpoint.")
]
NodeFailureDaysOption = Annotated[
    float, typer.Option(min=0.001, help="Days between two failures of one node.")
]
EfficiencyOption = Annotated[
    float,
    typer.Option(min=0.01, max=1, help="Share of the GPU's peak that products of matrices get."),
]


@app.command(context_settings=TAKES_OVERRIDES)
def plan(
    context: typer.Context,
    file: FileArgument,
    world: Annotated[int, typer.Option(min=1, help="Number of ranks, one for each GPU.")],
    nodes: NodesOption = None,
    gpu: Annotated[str, typer.Option(help=f"One of {', '.join(GPUS)}.")] = "H100",
    network_gbps: NetworkGbpsOption = 8 * DEFAULTS.network / 1e9,
    storage_rate: StorageRateOption = DEFAULTS.storage / 1e9,
    node_failure_days: NodeFailureDaysOption = DEFAULTS.node_failure / _DAY,
    efficiency: EfficiencyOption = DEFAULTS.compute_share,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> int:
    """Say what memory a rank will need, what it will send, how long a step will take and why.

    CONFIG, then --section.key=value. The training step itself is run, without memory and without
    the other ranks; no GPU is needed. Of a MODEL with a mixture of experts, for a program of your
    own, the memory is told by the degree of expert parallelism. Exits with 1 if the memory of a GPU
    is not enough.
    """
    if file.is_dir() or file.suffix == ".json":
        return divide(file, world, gpu, as_json, refused=context.args)
    config = load(file, overrides(context, file))
    find_gpu(gpu)  # refuse a wrong name before importing torch
    config, vocab_size = _with_data(config, world, nodes)
    # Nothing is computed: more threads would only take memory.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with busy("importing torch"):
        from kempner.training.plan.plan import plan as make
        from kempner.training.plan.plan import to_json, to_text

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


def _with_data(config: Config, world: int, nodes: int | None) -> tuple[Config, int]:
    """The configuration with the document masks that chats have anyway, where the data are there,
    and the size of the vocabulary: as configured, else of the data. Raises `DataError` if neither
    has it, `UsageError` if the ranks make no mesh."""
    resolve_mesh(config, world)
    ranks_on_a_node(config, world, nodes)
    known = config.model.vocab_size
    try:
        index = read_index(Path(config.data.dataset_path))
        known = known or vocabulary(config, index)
    except DataError as error:
        if known is not None:
            return config, known
        raise DataError(
            f"data.dataset_path={config.data.dataset_path}: {error}; or set model.vocab_size"
        ) from error
    masked = config.data.document_mask or index.kind != "text"
    data = config.data.model_copy(update={"document_mask": masked})
    return config.model_copy(update={"data": data}), known
