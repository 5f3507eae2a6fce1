"""`kempner status`: state of a run, or of the run of a Slurm job."""

from __future__ import annotations

import re
import shutil
import sys
from datetime import timedelta
from pathlib import Path
from textwrap import wrap
from typing import Annotated

import typer

from kempner.cli.usage.words import usable_path
from kempner.insight.job import find_run, read_job
from kempner.insight.progress import Progress
from kempner.insight.status import Status, read_status
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory


def register(app: typer.Typer) -> None:
    """Adds `status` to `app`."""
    app.command()(status)


def status(
    target: Annotated[
        str, typer.Argument(metavar="RUN_DIR|JOBID", help="A run's directory, or a Slurm job.")
    ],
) -> None:
    """Show the state of a run: step, loss, newest checkpoint; speed and ranks while it runs.

    For a Slurm job also how often it was requeued, by launch, scontrol and sacct.
    """
    job = target if re.fullmatch(r"\d+(_\d+)?", target) and not Path(target).exists() else None
    run = RunDirectory(usable_path(Path(target))) if job is None else find_run(job, Path("runs"))
    if not run.ledger.is_file():
        raise UsageError(
            f"{target} is not a run: it has no ledger.jsonl; name <run.dir>/<run.name>, or a job id"
        )
    history = RunHistory.read(run.ledger)
    found = read_status(run, history)
    state = found.state if found.gave_up is None else f"given up, see {run.gave_up}"
    for name, value in {
        "run": str(run.path),
        **({} if job is None else read_job(job, history).rows()),
        "state": state,
        **_rows(found),
    }.items():
        for line in table_row(name, value, terminal_columns()):
            typer.echo(line)
    if found.gave_up is not None:
        typer.echo(found.gave_up)


def _rows(found: Status) -> dict[str, str]:
    """What to show of a run, under which name."""
    progress, latest = found.progress, found.latest_checkpoint
    rows = {"step": _step(progress), "loss": _known(progress.loss, "{:.4f}")}
    if found.alive:
        rows["speed"] = _known(progress.tokens_per_second, "{:,.0f} tokens/s")
        left = progress.seconds_left
        rows["time left"] = "-" if left is None else str(timedelta(seconds=round(left)))
    rows |= {"latest checkpoint": _known(latest, "{}"), "attempts": str(found.attempts)}
    return rows | dict(found.ranks)


def _step(progress: Progress) -> str:
    total = "" if progress.total is None else f" of {progress.total}"
    return "-" if progress.step is None else f"{progress.step}{total}"


def _known(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def terminal_columns() -> int | None:
    """The width of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_row(name: str, value: str, columns: int | None) -> list[str]:
    """A name and its value, in lines of at most so many columns, the name's own on a narrow screen.

    None: one line, however long.
    """
    if columns is None or len(value) + 19 <= columns:
        return [f"{name:<18} {value}"]
    if columns >= 60:
        indent = 19 * " "
        return wrap(value, columns, initial_indent=f"{name:<18} ", subsequent_indent=indent)
    if len(name) + len(value) + 2 <= columns:
        return [f"{name}: {value}"]
    return [f"{name}:", *wrap(value, columns, initial_indent="  ", subsequent_indent="  ")]
