"""`kempner checkpoint`: list and verify checkpoints, without torch, and delete old ones.

`kempner prune`: delete the logs of old attempts.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from kempner.checkpoint.format.manifest import Manifest, rank_of, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder, parse_aside
from kempner.checkpoint.io.verify import Damage, record
from kempner.checkpoint.io.verify import verify as find_damage
from kempner.checkpoint.store.retention import (
    Item,
    Keep,
    Readers,
    at_step,
    expendable,
    locate,
    named_as_base,
    reading_at,
    survey,
)
from kempner.checkpoint.store.retention import prune as delete
from kempner.checkpoint.store.selection import damage_of_base
from kempner.cli.progress import counter
from kempner.run.output.units import size_text, spans
from kempner.run.process.exit_codes import CheckpointWriteError, DataError, ExitCode, UsageError
from kempner.run.process.retry import describe
from kempner.run.record.attempts import (
    CURRENT,
    decide_fates,
    needed_attempts,
    survey_attempts,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.training.corruption import certified_step

Folder = Annotated[
    Path,
    typer.Argument(
        metavar="RUN_DIR|DIR", help="A run's directory, its checkpoint folder, or one checkpoint."
    ),
]

app = typer.Typer(rich_markup_mode=None)
commands = typer.Typer(
    help="List, verify, delete and exchange a run's checkpoints.",
    rich_markup_mode=None,
    add_completion=False,
)
app.add_typer(commands, name="checkpoint")


@commands.command("list")
def list_(directory: Folder) -> None:
    """List step, age, size, world size and verification of every checkpoint."""
    folder, only = locate(directory)
    now, certified = time.time(), _certified(RunDirectory(directory))
    typer.echo(f"{'step':>10}  {'age':>7}  {'size':>10}  {'world':>5}  {'verified':<10}  note")
    for item in survey(folder):
        if only in (None, item.path):
            typer.echo(_row(item, now, certified).rstrip())
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
        try:
            size = _bytes(read(path))
        except DataError:
            size = 0  # without a manifest, no file is read
        with counter(f"reading {path.name}", size) as on_read, reading_at(path, unwritable.append):
            damages = find_damage(path, on_read) or damage_of_base(path)
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
    keep = Keep(keep_last, keep_every, pinned=named_as_base(folder))
    going = {folder.step(step) for step in expendable(folder.committed(), latest, keep)}
    items = survey(folder)
    failed = {} if dry_run else delete(folder, keep, Readers(folder), check=lambda: None)
    for item in items:
        verb = "stays"
        if item.path in going:
            kept = "in use" if item.path.exists() else "gone"
            verb = "would go" if dry_run else "failed" if item.step in failed else kept
        typer.echo(f"{verb:<8}  {item.path.name}  {item.note}".rstrip())
    if failed:
        failures = ", ".join(f"step {step} ({error.strerror})" for step, error in failed.items())
        raise CheckpointWriteError(f"could not delete: {failures}")


def warn_unmarked(error: OSError) -> None:
    typer.echo(
        f"kempner: the checkpoint's folder cannot be written to ({error.strerror}), so its run "
        "does not know that it is being read, and may delete it meanwhile",
        err=True,
    )


def _latest_is_missing(folder: CheckpointFolder) -> str:
    """A sentence if `latest` names a checkpoint that does not exist; empty if all is well."""
    latest = folder.latest()
    if latest is None or latest in folder.committed():
        return ""
    return f"`latest` names step {latest}, which is not committed: it has no {MANIFEST}"


def _certified(run: RunDirectory) -> int:
    """The step up to which the checkpoints of a run are certified; 0 where no ledger says so."""
    try:
        return certified_step(RunHistory.read(run.ledger))
    except OSError:
        return 0


def _row(item: Item, now: float, certified: int) -> str:
    proof = ""
    if item.manifest is not None and parse_aside(item.path.name) is None:
        checked = item.manifest.train_state.checked
        proof = "" if checked is None else f"checked up to step {checked}"
        proof = "certified" if item.step <= certified else proof
    notes = "; ".join(filter(None, (item.note, proof, item.problem)))
    if item.manifest is None:
        return f"{item.step:>10}  {'-':>7}  {'-':>10}  {'-':>5}  {'-':<10}  {notes}"
    age, size = since(now - item.manifest.created), size_text(_bytes(item.manifest))
    world, verified = item.manifest.identity.world, "no"
    if item.finding is not None:
        found = item.finding
        verified = "damaged" if found.damaged else f"{since(now - found.time)} ago"
    return f"{item.step:>10}  {age:>7}  {size:>10}  {world:>5}  {verified:<10}  {notes}"


def _report(path: Path, damages: list[Damage]) -> None:
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
    """Store a finding for `list`; if that fails, add the error to `failures`."""
    try:
        record(path.parent, read(path), damages, time.time())
    except DataError:
        return  # `list` checks the manifest itself
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


def _bytes(manifest: Manifest) -> int:
    return sum(entry.bytes for entry in manifest.files.values())


def since(seconds: float) -> str:
    minutes, hours = int(seconds) // 60, int(seconds) // 3600
    if hours >= 48:
        return f"{hours // 24} d"
    return f"{hours} h" if hours else f"{minutes} min" if minutes else f"{int(seconds)} s"


OlderThanOption = Annotated[
    str | None,
    typer.Option(metavar="AGE", help="Only logs that were last written before: 12h, 30d or 8w."),
]
KeepLastOption = Annotated[
    int | None, typer.Option(min=1, help="Number of newest attempts to keep.")
]
DryRunOption = Annotated[bool, typer.Option("--dry-run", help="Only show what would be deleted.")]


@app.command("prune")
def prune_logs(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    older_than: OlderThanOption = None,
    keep_last: KeepLastOption = None,
    dry_run: DryRunOption = False,
) -> None:
    """Delete the logs of old attempts; for checkpoints there is `kempner checkpoint prune`.

    Ledger, metrics, configuration and checkpoints stay, and so do the live or last attempt and the
    one that GAVE_UP names.
    """
    if older_than is None and keep_last is None:
        raise UsageError("say which logs are old, with --older-than AGE or --keep-last N")
    run = RunDirectory(directory)
    if not run.ledger.exists():
        raise UsageError(f"{directory} is not a run: it has no ledger.jsonl")
    seconds = 0.0 if older_than is None else _seconds(older_than)
    now = time.time()
    try:
        found, needed = survey_attempts(run), needed_attempts(run)
        fates = decide_fates(found, needed, now, keep_last or 1, seconds)
    except OSError as error:
        raise UsageError(f"the attempts cannot be read: {describe(error)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{run.attempts / CURRENT} is damaged, so kempner cannot tell which attempt is live; "
            "start the run once, or delete old folders by hand"
        ) from error
    for fate in fates:
        folder, verb = run.attempt(fate.logs.number), "stays"
        if fate.goes:
            verb = "would go" if dry_run else "gone"
        if fate.goes and not dry_run:
            _delete(folder)
        age, size = since(now - fate.logs.written), size_text(fate.logs.bytes)
        name = folder.relative_to(run.path)
        typer.echo(f"{verb:<8}  {name!s:<14}  {age:>6}  {size:>10}  {fate.why}".rstrip())
    going = [fate.logs.bytes for fate in fates if fate.goes]
    done = "would go, which frees" if dry_run else "deleted, which freed"
    typer.echo(f"{len(going)} of {len(fates)} attempts {done} {size_text(sum(going))}")


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be deleted: {error.strerror}") from error


_UNITS = {"h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def _seconds(age: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6})([hdw])", age)
    if match is None:
        raise UsageError(f"--older-than {age} is not an age; write 12h, 30d or 8w")
    return float(match[1]) * _UNITS[match[2]]
