"""`kempner checkpoint`: look at checkpoints, without torch."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kempner.checkpoint.layout import CheckpointFolder
from kempner.checkpoint.manifest import read
from kempner.checkpoint.verify import verify as find_damage
from kempner.run.exit_codes import DataError, ExitCode, UsageError
from kempner.run.layout import RunDirectory

Folder = Annotated[
    Path, typer.Argument(metavar="RUN_DIR|DIR", help="A run's directory, or its checkpoints.")
]

commands = typer.Typer(
    help="List or verify a run's checkpoints.", rich_markup_mode=None, add_completion=False
)


def register(app: typer.Typer) -> None:
    """Adds `checkpoint list` and `checkpoint verify` to `app`."""
    app.add_typer(commands, name="checkpoint")


@commands.command("list")
def list_(directory: Folder) -> None:
    """Print step, age, size and world of every committed checkpoint."""
    folder = _open(directory)
    latest = folder.latest()
    typer.echo(f"{'step':>10}  {'age':>10}  {'size':>10}  {'world':>5}")
    for step in folder.committed():
        try:
            manifest = read(folder.step(step))
        except DataError as error:
            typer.echo(f"{step:>10}  {error}")
            continue
        size = sum(entry.bytes for entry in manifest.files.values())
        age = _duration(time.time() - manifest.created)
        mark = "  <- latest" if step == latest else ""
        typer.echo(f"{step:>10}  {age:>10}  {_size(size):>10}  {manifest.identity.world:>5}{mark}")


@commands.command()
def verify(directory: Folder) -> ExitCode:
    """Read every byte of every checkpoint; exit 65 if anything is not as it was committed."""
    folder = _open(directory)
    damaged = False
    for step in folder.committed():
        damages = find_damage(folder.step(step))
        damaged = damaged or bool(damages)
        typer.echo(f"step {step}: {'damaged' if damages else 'ok'}")
        for damage in damages:
            typer.echo(f"  {damage}")
    return ExitCode.BAD_DATA if damaged else ExitCode.COMPLETED


def _open(directory: Path) -> CheckpointFolder:
    inside = RunDirectory(directory).checkpoints
    folder = CheckpointFolder(inside if inside.is_dir() else directory)
    if not folder.committed():
        raise UsageError(
            f"{directory} holds no checkpoint; give a run's directory or the folder in which its "
            "step-... folders are"
        )
    return folder


def _duration(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h" if hours else f"{minutes} min" if minutes else f"{int(seconds)} s"


def _size(size: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
