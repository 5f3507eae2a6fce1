"""`kempner config`: show or check a configuration, or list all keys."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.usage.words import overrides
from kempner.config.fault_spec import refuse_absent_ranks
from kempner.config.loading import dumps, load
from kempner.config.sections import Config
from kempner.model.spec.memory import estimate_memory
from kempner.model.spec.shape import Shape, count_parameters
from kempner.run.record.run_dir import RunDirectory

ConfigFile = Annotated[Path, typer.Argument(metavar="CONFIG", help="Configuration in TOML.")]
"""The first argument of every command that takes a configuration."""

TAKES_OVERRIDES = {"allow_extra_args": True, "ignore_unknown_options": True}
"""`context_settings` of such a command; `overrides` gives `load` what it read."""

commands = typer.Typer(
    help="Show or check a configuration, or list all keys.",
    rich_markup_mode=None,
    add_completion=False,
)


def register(app: typer.Typer) -> None:
    """Adds `config show`, `config check` and `config schema` to `app`."""
    app.add_typer(commands, name="config")


@commands.command(context_settings=TAKES_OVERRIDES)
def show(context: typer.Context, file: ConfigFile) -> None:
    """Print the configuration as a run would use it: CONFIG, then --section.key=value."""
    typer.echo(dumps(load(file, overrides(context, file))), nl=False)


@commands.command(context_settings=TAKES_OVERRIDES)
def check(
    context: typer.Context,
    file: ConfigFile,
    world: Annotated[
        int | None, typer.Option(min=1, help="Estimate the memory of one of this many ranks.")
    ] = None,
) -> None:
    """Check a configuration and what it needs: data, run directory, disk space.

    CONFIG, then --section.key=value.
    """
    config = load(file, overrides(context, file))
    if world is not None:
        refuse_absent_ranks(config.resilience.faults, world)
    from kempner.supervisor.readiness import check_ready, check_run_directory

    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    check_run_directory(run)
    vocab_size = config.model.vocab_size
    if world is not None and vocab_size is not None:  # known also where the data is not
        typer.echo(memory(config, vocab_size, world))
    ready = check_ready(config, run)
    for warning in ready.warnings:
        typer.echo(f"kempner: {warning}", err=True)
    if world is not None and vocab_size is None:
        typer.echo(memory(config, ready.vocab_size, world))
    typer.echo(f"ok: {file}: {summary(config, ready.vocab_size)}")


@commands.command()
def schema() -> None:
    """Print the JSON schema of all sections and keys, with their meaning."""
    typer.echo(json.dumps(Config.model_json_schema(), indent=2))


def summary(config: Config, vocab_size: int) -> str:
    """Where the run goes, how long it is and how large its model, in one line."""
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


def memory(config: Config, vocab_size: int, world: int) -> str:
    """What one of `world` ranks needs on its device, in one line."""
    train = config.train
    if config.model.factory is not None:
        return f"what model.factory={config.model.factory} needs is not known before it is called"
    estimate = estimate_memory(
        Shape.of(config.model, vocab_size),
        world=world,
        micro_batch_size=train.micro_batch_size,
        seq_len=train.seq_len,
        compute_bytes=4 if train.dtype == "float32" else 2,
        optimizer=config.optimizer,
        loss_chunk=train.loss_chunk,
        checkpointing=train.activation_checkpointing,
        checkpointing_every=train.activation_checkpointing_every or 1,
    )
    parts = ", ".join(f"{name} {_gb(size)}" for name, size in asdict(estimate).items() if size)
    return f"one of {world} ranks needs about {_gb(estimate.total)} on its device: {parts}"


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
