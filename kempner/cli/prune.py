"""`kempner prune`: delete the logs of old attempts of a run."""

from __future__ import annotations

import re
import shutil
import time
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.checkpoint.inspect import since
from kempner.run.output.units import size_text
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.retry import describe
from kempner.run.record.attempt_logs import (
    LogFate,
    Rule,
    decide_fates,
    needed_attempts,
    survey_attempts,
)
from kempner.run.record.attempts import CURRENT
from kempner.run.record.run_dir import RunDirectory

_UNITS = {"h": 3600, "d": 24 * 3600, "w": 7 * 24 * 3600}


def register(app: typer.Typer) -> None:
    app.command()(prune)


def prune(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE", help="Only logs that were last written before: 12h, 30d or 8w."
        ),
    ] = None,
    keep_last: Annotated[
        int | None, typer.Option(min=1, help="Number of newest attempts to keep.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only show what would be deleted.")
    ] = False,
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
    rule = Rule(keep_last or 1, 0.0 if older_than is None else _seconds(older_than))
    now = time.time()
    try:
        fates = decide_fates(survey_attempts(run), rule, needed_attempts(run), now)
    except OSError as error:
        raise UsageError(f"the attempts cannot be read: {describe(error)}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise UsageError(
            f"{run.attempts / CURRENT} is damaged, so kempner cannot tell which attempt is live; "
            "start the run once, or delete old folders by hand"
        ) from error
    for fate in fates:
        if fate.goes and not dry_run:
            _delete(run.attempt(fate.logs.number))
        typer.echo(_row(run, fate, now, dry_run).rstrip())
    going = [fate.logs.bytes for fate in fates if fate.goes]
    done = "would go, which frees" if dry_run else "deleted, which freed"
    typer.echo(f"{len(going)} of {len(fates)} attempts {done} {size_text(sum(going))}")


def _delete(folder: Path) -> None:
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise UsageError(f"{folder} cannot be deleted: {error.strerror}") from error


def _row(run: RunDirectory, fate: LogFate, now: float, dry_run: bool) -> str:
    verb = ("would go" if dry_run else "gone") if fate.goes else "stays"
    name = run.attempt(fate.logs.number).relative_to(run.path)
    age, size = since(now - fate.logs.written), size_text(fate.logs.bytes)
    return f"{verb:<8}  {name!s:<14}  {age:>6}  {size:>10}  {fate.why}"


def _seconds(age: str) -> float:
    match = re.fullmatch(r"([0-9]{1,6})([hdw])", age)
    if match is None:
        raise UsageError(f"--older-than {age} is not an age; write 12h, 30d or 8w")
    return float(match[1]) * _UNITS[match[2]]
