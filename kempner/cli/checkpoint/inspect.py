"""`kempner checkpoint`: list and verify checkpoints, without torch, and delete old ones."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from kempner.checkpoint.format.manifest import Manifest, rank_of, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.io.verify import Damage, record
from kempner.checkpoint.io.verify import verify as find_damage
from kempner.checkpoint.store.retention import (
    Item,
    Keep,
    Readers,
    at_step,
    expendable,
    locate,
    reading_at,
    survey,
)
from kempner.checkpoint.store.retention import prune as delete
from kempner.cli.progress import bar
from kempner.run.output.units import size_text, spans
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, ExitCode, UsageError
from kempner.training.observe.progress_bar import SteadyConsole

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|DIR", help="A run's directory, its checkpoint folder, or one checkpoint."
    ),
]

commands = typer.Typer(
    help="List, verify, delete and exchange a run's checkpoints.",
    rich_markup_mode=None,
    add_completion=False,
)


def register(app: typer.Typer) -> None:
    """Adds `checkpoint list`, `checkpoint verify` and `checkpoint prune` to `app`."""
    app.add_typer(commands, name="checkpoint")


@commands.command("list")
def list_(directory: Folder) -> None:
    """List step, age, size, world size and verification of every checkpoint."""
    folder, only = locate(directory)
    now = time.time()
    typer.echo(f"{'step':>10}  {'age':>7}  {'size':>10}  {'world':>5}  {'verified':<10}  note")
    for item in survey(folder):
        if only in (None, item.path):
            typer.echo(_row(item, now).rstrip())
    if sentence := _latest_is_missing(folder):
        typer.echo(sentence)


@commands.command()
def verify(
    directory: Folder,
    steps: Annotated[
        list[int] | None, typer.Argument(metavar="[STEP]...", help="Verify only these steps.")
    ] = None,
) -> ExitCode:
    """Read every byte of every checkpoint; exit 65 if anything differs from what was committed."""
    folder, only = locate(directory)
    wanted = [at_step(folder, step) for step in steps or folder.committed()]
    paths = [only] if only and not steps else wanted
    missing = "" if only or steps else _latest_is_missing(folder)
    if not paths and not missing:
        raise UsageError(f"{folder.path} has no committed checkpoint to verify")
    damaged, unwritable = 0, list[OSError]()
    for path in paths:
        with _progress(path) as on_read, reading_at(path, unwritable.append):
            damages = find_damage(path, on_read)
        damaged += bool(damages)
        _report(path, damages)
        _keep(path, damages, unwritable)
    if missing:
        typer.echo(missing)
    typer.echo(f"{len(paths)} read, {damaged} damaged")
    if unwritable:
        typer.echo(
            f"kempner: {folder.path} cannot be written to ({unwritable[0].strerror}), so `list` "
            "will not know these results, and the run could have deleted what was being read",
            err=True,
        )
    return ExitCode.BAD_DATA if damaged or missing else ExitCode.COMPLETED


@commands.command()
def prune(
    directory: Folder,
    keep_last: Annotated[int, typer.Option(min=1, help="Number of newest checkpoints to keep.")],
    keep_every: Annotated[
        int | None,
        typer.Option(min=1, metavar="STEPS", help="Also keep steps that are multiples of this."),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
) -> None:
    """Delete old checkpoints; never `latest`, later ones, or those that were set aside."""
    folder, only = locate(directory)
    if only is not None:
        raise UsageError(f"{directory} is one checkpoint; name the folder that contains it")
    latest = folder.latest()
    if latest is None:
        raise UsageError(
            f"{folder.path} has no `latest`, so kempner cannot tell which checkpoints are old"
        )
    keep = Keep(keep_last, keep_every)
    going = {folder.step(step) for step in expendable(folder.committed(), latest, keep)}
    items = survey(folder)
    failed = {} if dry_run else delete(folder, keep, Readers(folder), check=lambda: None)
    for item in items:
        verb = _fate(item, dry_run, failed) if item.path in going else "stays"
        typer.echo(f"{verb:<8}  {item.path.name}  {item.note}".rstrip())
    if failed:
        told = ", ".join(f"step {step} ({error.strerror})" for step, error in failed.items())
        raise CheckpointWriteError(f"could not delete: {told}")


def _fate(item: Item, dry_run: bool, failed: Collection[int]) -> str:
    if dry_run:
        return "would go"
    if item.step in failed:
        return "failed"
    return "in use" if item.path.exists() else "gone"


def _latest_is_missing(folder: CheckpointFolder) -> str:
    """What is wrong where `latest` names a checkpoint that is not there; empty if nothing is."""
    latest = folder.latest()
    if latest is None or latest in folder.committed():
        return ""
    return f"`latest` names step {latest}, which is not committed: it has no {MANIFEST}"


def _row(item: Item, now: float) -> str:
    notes = "; ".join(filter(None, (item.note, item.problem)))
    if item.manifest is None:
        return f"{item.step:>10}  {'-':>7}  {'-':>10}  {'-':>5}  {'-':<10}  {notes}"
    age, size = since(now - item.manifest.created), size_text(_bytes(item.manifest))
    world = item.manifest.identity.world
    return f"{item.step:>10}  {age:>7}  {size:>10}  {world:>5}  {_verified(item, now):<10}  {notes}"


def _verified(item: Item, now: float) -> str:
    if item.finding is None:
        return "no"
    return "damaged" if item.finding.damaged else f"{since(now - item.finding.time)} ago"


def _report(path: Path, damages: list[Damage]) -> None:
    """Say, rank by rank, what is wrong with a checkpoint."""
    try:
        manifest = read(path)
    except DataError as error:
        typer.echo(f"{path.name}: damaged\n  {error}")
        return
    world, size = manifest.identity.world, size_text(_bytes(manifest))
    verdict = "damaged" if damages else "ok"
    typer.echo(f"{path.name}: {verdict} (world {world}, {size})")
    for line in _by_rank(manifest, damages) if damages else ():
        typer.echo(f"  {line}")


def _keep(path: Path, damages: list[Damage], failures: list[OSError]) -> None:
    """Keep a finding for `list`; where that cannot be, the reason is added to `failures`."""
    try:
        record(path.parent, read(path), damages, time.time())
    except DataError:
        return  # `list` sees by itself what is wrong with a manifest
    except OSError as error:
        failures.append(error)


def _by_rank(manifest: Manifest, damages: Iterable[Damage]) -> Iterator[str]:
    ranks = {name: rank_of(name, entry) for name, entry in manifest.files.items()}
    bad = set()
    for damage in damages:
        rank = ranks.get(damage.file)
        bad.add(rank)
        yield f"{'all ranks' if rank is None else f'rank {rank}'}: {damage}"
    if good := sorted({rank for rank in ranks.values() if rank is not None} - bad):
        yield f"{'ranks' if good[1:] else 'rank'} {spans(good)}: ok"


@contextmanager
def _progress(path: Path) -> Iterator[Callable[[int], None]]:
    """Counts the bytes read of a checkpoint, from whatever thread, on a bar."""
    try:
        total = _bytes(read(path))
    except DataError:
        total = 0  # it is not read either
    done, lock = 0, threading.Lock()
    with bar(SteadyConsole(stderr=True), f"reading {path.name}") as show:

        def count(length: int) -> None:
            nonlocal done
            with lock:
                done += length
            show(done, total)

        yield count


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files.values())


def since(seconds: float) -> str:
    """An age, in its largest unit."""
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h" if hours else f"{minutes} min" if minutes else f"{int(seconds)} s"
