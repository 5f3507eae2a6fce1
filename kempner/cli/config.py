"""`kempner config`: show, check or convert a configuration, or explain its keys."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.usage import overrides
from kempner.config.loading import dumps, load
from kempner.config.resilience import refuse_absent_ranks
from kempner.config.sections import Config
from kempner.data.order.batch_slices import micro_steps
from kempner.model.spec.memory import USUAL_GPU, Situation, choose, estimate_memory, step_traffic
from kempner.model.spec.mesh import ranks_on_a_node, resolve_mesh
from kempner.model.spec.shape import Shape, count_parameters
from kempner.run.output.logs import logger
from kempner.run.output.units import count, size_text
from kempner.run.record.run_dir import RunDirectory

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration in TOML.")]
"""The first argument of every command that takes a configuration."""

TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""`context_settings` of such a command; `overrides` returns the unknown options, for `load`."""

app = typer.Typer(rich_markup_mode=None)
commands = typer.Typer(
    help="Show, check or convert a configuration, or explain its keys.",
    rich_markup_mode=None,
    add_completion=False,
)
app.add_typer(commands, name="config")


@commands.command(context_settings=TAKES_OVERRIDES)
def show(context: typer.Context, file: ConfigFile) -> None:
    """Print the configuration as a run would use it: CONFIG, then --section.key=value."""
    typer.echo(dumps(load(file, overrides(context, file))), nl=False)


WorldOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Say how this many ranks are divided, what each needs and what they send."
    ),
]
NodesOption = Annotated[
    int | None,
    typer.Option(min=1, help="With --world: nodes that they are on; by default 8 on each."),
]
GpuMemoryOption = Annotated[
    float, typer.Option(min=0, help="With --world: memory of a GPU in GB; 0 for ranks on CPUs.")
]


@commands.command(context_settings=TAKES_OVERRIDES)
def check(
    context: typer.Context,
    file: ConfigFile,
    world: WorldOption = None,
    nodes: NodesOption = None,
    gpu_memory: GpuMemoryOption = USUAL_GPU / 1e9,
) -> None:
    """Check a configuration and what it needs: data, run directory, disk space.

    CONFIG, then --section.key=value.
    """
    config = load(file, overrides(context, file), logger().warning)
    if world is not None:
        refuse_absent_ranks(config.resilience.faults, world)
        resolve_mesh(config, world)
    from kempner.supervisor.readiness import check_ready, check_run_directory

    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    check_run_directory(run)
    vocab_size = config.model.vocab_size
    known = vocab_size is not None  # even without the data
    job = None if world is None else PlannedJob.of(config, world, nodes, int(gpu_memory * 10**9))
    if job is not None and vocab_size is not None:
        typer.echo(needs(config, vocab_size, job))
    ready = check_ready(config, run)
    for warning in ready.warnings:
        typer.echo(f"kempner: {warning}", err=True)
    if job is not None and not known:
        typer.echo(needs(config, ready.vocab_size, job))
    if world is not None:
        typer.echo(f"mesh of {count(world, 'rank')}: {resolve_mesh(config, world)}")
    typer.echo(f"ok: {file}: {summary(config, ready.vocab_size)}")


@commands.command("explain")
def explain_key(
    key: Annotated[
        str,
        typer.Argument(
            metavar="[KEY]",
            help="A key or a section, such as optimizer.lr or optimizer; else all sections.",
        ),
    ] = "",
) -> None:
    """Say what a key takes and means, or list the keys of a section."""
    from kempner.config.explain import explain

    typer.echo(explain(key))


@commands.command("convert")
def convert_file(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A configuration in YAML.")],
) -> None:
    """Print a configuration in YAML as TOML.

    kempner config convert old.yaml > new.toml; keys of torchtitan and torchforge get their names
    here, and what is left out is told.
    """
    from kempner.config.convert import convert

    made = convert(file)
    typer.echo(made.toml(), nl=False)
    for remark in made.remarks:
        typer.echo(f"kempner: {remark}", err=True)


def summary(config: Config, vocab_size: int) -> str:
    train = config.train
    return ", ".join(
        [
            f"run {Path(config.run.dir) / str(config.run.name)}",
            f"{train.max_steps:,} steps of {train.global_batch_size * train.seq_len:,} tokens",
            f"model {config.model.factory}"
            if config.model.factory is not None
            else f"{count_parameters(config.model, vocab_size):,} parameters",
        ]
    )


@dataclass(frozen=True)
class PlannedJob:
    """The planned number of ranks, in all and per node, and their GPUs."""

    world: int
    ranks_per_node: int
    gpu_memory: int | None  # bytes; None on CPUs
    assumed: bool = False  # whether the number of ranks per node is a guess

    @classmethod
    def of(cls, config: Config, world: int, nodes: int | None, gpu_memory: int) -> PlannedJob:
        """By the options, else by `[slurm]`. Raises `UsageError` if the nodes would have different
        numbers of ranks."""
        slurm = config.slurm
        given_size = nodes or slurm.hosts or slurm.procs or slurm.gpus_per_node
        return cls(
            world, ranks_on_a_node(config, world, nodes), gpu_memory or None, given_size is None
        )


def needs(config: Config, vocab_size: int, job: PlannedJob) -> str:
    if config.model.factory is not None:
        return f"what model.factory={config.model.factory} needs is not known before it is called"
    train, shape = config.train, Shape.of(config.model, vocab_size)
    mesh = resolve_mesh(config, job.world)
    micro_batches = micro_steps(train.global_batch_size, mesh.data_world, train.micro_batch_size)
    situation = Situation(
        shape,
        mesh,
        job.ranks_per_node,
        micro_batches,
        compute_bytes=4 if train.dtype == "float32" else 2,
        gpu_memory=job.gpu_memory,
    )
    choice = choose(config, situation)
    memory = estimate_memory(config, shape, mesh, situation.compute_bytes, choice)
    parts = ", ".join(f"{name} {size_text(size)}" for name, size in asdict(memory).items() if size)
    rank = "the rank" if job.world == 1 else f"one of {job.world:,} ranks"
    lines = [f"{rank} needs about {size_text(memory.total)} on its device: {parts}"]
    if mesh.world > 1:
        traffic = step_traffic(config, situation, shape, choice)
        among = f"{size_text(traffic.within)} among its {job.ranks_per_node} ranks"
        if job.world > job.ranks_per_node:
            among = f"{size_text(traffic.between)} to other nodes and {among}"
        lines += [
            f"communication: {choice.describe()}: {choice.reason}",
            f"in a step each node sends {among}"
            + (", unless --nodes says otherwise" if job.assumed else ""),
        ]
    return "\n".join(lines)
