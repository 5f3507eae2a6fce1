"""`kempner status`: state of a run, of the run of a Slurm job, or of all runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, TypeAlias

import typer

from kempner.cli.insight.status_words import line, rows
from kempner.cli.insight.target import is_job, named_run
from kempner.insight.status.job import JobWatch, find_run
from kempner.insight.status.runs import AllRuns, RunFollower, find_runs, pending, places
from kempner.insight.status.summary import Status
from kempner.run.process.exit_codes import UsageError

app = typer.Typer(rich_markup_mode=None)

Read: TypeAlias = Callable[[], Sequence[tuple[str, Status]]]  # name and current status of each run

PATIENCE = 5.0  # seconds for which Slurm is asked again while it does not answer


@app.command()
def status(
    target: Annotated[
        str | None,
        typer.Argument(
            metavar="[RUN_DIR|JOBID]",
            help="A run's directory or name, or its Slurm job; else all runs.",
        ),
    ] = None,
    watch: Annotated[
        bool, typer.Option("--watch", help="Show it until Ctrl-C, always up to date.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON array.")] = False,
) -> None:
    """Show what a run is doing: step, loss, speed, time left, newest checkpoint, interruptions.

    Who waits for whom while it runs; for a Slurm job also what Slurm says of it. Without an
    argument one line for each run below runs/ and the run.dir of configs/. Reads only.
    """
    if watch and as_json:
        raise UsageError("--json and --watch exclude each other; call --json as often as you like")
    read = _all(patient=not watch) if target is None else _one(target, patient=not watch)
    if watch:
        from kempner.cli.insight.status_view import show_until_ctrl_c

        show_until_ctrl_c(read, together=target is None)
        return
    found = read()
    if as_json:
        typer.echo(
            json.dumps([{"run": name or None, **each.to_json()} for name, each in found], indent=2)
        )
    elif sys.stdout.isatty():
        from kempner.cli.insight.status_view import print_once

        print_once(found, together=target is None)
    elif target is None:
        for name, each in found:
            typer.echo(line(name, each))
    else:
        _print_rows(*found[0])


def _print_rows(name: str, found: Status) -> None:
    for label, value in rows(name, found):
        typer.echo(f"{label:<18} {value}")
    if found.facts.gave_up is not None:
        typer.echo(found.facts.gave_up)


def _all(*, patient: bool) -> Read:
    where = places(Path())
    if patient and not find_runs(where):
        named = ", ".join(map(str, where))
        raise UsageError(f"there is no run below {named}; name <run.dir>/<run.name>, or a job id")
    return AllRuns(where, patient=patient).read


def _one(target: str, *, patient: bool) -> Read:
    if is_job(target):
        return _of_job(target, patient=patient)
    run = named_run(target)
    follower = RunFollower(run, JobWatch(None, wait=patient), patient=patient)
    return lambda: [(str(run.path), follower.read())]


def _of_job(job: str, *, patient: bool) -> Read:
    """A reader of a job's run; of the job alone until it has a run."""
    asked = JobWatch(job, accounting=patient, within=PATIENCE, wait=patient)
    follower: RunFollower | None = None

    def read() -> Sequence[tuple[str, Status]]:
        nonlocal follower
        if follower is None:
            run = find_run(job, find_runs(places(Path())), PATIENCE)
            if run is None or not run.ledger.is_file():
                return [("", pending(asked))]
            follower = RunFollower(run, asked, patient=patient)
        return [(str(follower.run.path), follower.read())]

    return read
