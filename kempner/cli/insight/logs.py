"""`kempner logs`: the logs and the printed output of a run's processes."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kempner.cli.insight.target import RUN, RUN_METAVAR, run_of
from kempner.cluster.machine import raise_open_file_limit
from kempner.insight.attempt_lines import AttemptLines, shown
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import JobWatch
from kempner.insight.status.runs import RunFollower
from kempner.run.process.exit_codes import UsageError, cannot_read
from kempner.run.record.attempts import attempt_numbers
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)

_LOOK = 0.5  # seconds between two looks at the files

_GOES_ON = (Activity.QUEUED, Activity.UNKNOWN, Activity.NOT_STARTED)
"""Activities of a run that is not live, but may be again."""


@app.command()
def logs(
    target: Annotated[str, typer.Argument(metavar=RUN_METAVAR, help=RUN)],
    rank: Annotated[
        int | None, typer.Option(min=0, help="Only this rank; else all, and the supervisor.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="By default the last one.")] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Go on until the run ends, over its restarts.")
    ] = False,
) -> None:
    """Print the logs of a run's last attempt, each line with the rank that it is of.

    What a rank has printed follows what it has logged. `kempner triage` says what failed first.
    """
    if follow and attempt is not None:
        raise UsageError("--follow is for the last attempt: leave --attempt out")
    raise_open_file_limit()
    run = run_of(target)
    try:
        if follow:
            _follow(run, rank)
        else:
            _print_once(run, attempt, rank)
    except KeyboardInterrupt:
        return
    except OSError as error:
        if error.filename is None:
            raise  # standard output
        raise cannot_read(error.filename, error) from error


def _print_once(run: RunDirectory, attempt: int | None, rank: int | None) -> None:
    there = _attempts(run)
    if not there or (attempt is not None and attempt not in there):
        kept = f"; there are those of {', '.join(map(str, there))}" if there else ""
        which = "an attempt" if attempt is None else f"attempt {attempt}"
        raise UsageError(f"{run.path} has no logs of {which}{kept}")
    lines = AttemptLines(run, attempt or there[-1], rank)
    if not _show(lines) and rank is not None:
        raise UsageError(f"there are no logs of rank {rank} in {lines.folder}")


def _follow(run: RunDirectory, rank: int | None) -> None:
    follower = RunFollower(run, JobWatch(None, wait=False), patient=False)
    number, lines, over = 0, None, False
    while True:
        newest = max(_attempts(run), default=0)
        _show(lines)
        if newest > number:
            number, lines = newest, AttemptLines(run, newest, rank)
            typer.echo(f"attempt {number}", err=True)
            _show(lines)
        if over:
            return
        activity = follower.read().doing.activity
        over = not (activity.is_live or activity in _GOES_ON)
        if not over:
            time.sleep(_LOOK)


def _show(lines: AttemptLines | None) -> bool:
    """Print new lines; returns whether there are any."""
    has_lines = False
    for text in () if lines is None else shown(lines.read()):
        typer.echo(text)
        has_lines = True
    return has_lines


def _attempts(run: RunDirectory) -> list[int]:
    return sorted(attempt_numbers(run)) if run.attempts.is_dir() else []
