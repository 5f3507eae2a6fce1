"""`kempner profile`: a trace of some steps, while the run goes on."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.usage import usable_path
from kempner.insight.run_reader import RunReader
from kempner.insight.status.summary import summarise
from kempner.run.process.exit_codes import ExitCode, UsageError, cannot_read
from kempner.run.record.profile_request import ProfileMail
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)

_LOOK = 0.5  # seconds between two looks for the answer


@app.command()
def profile(
    run_dir: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="A run's directory.")],
    rank: Annotated[int, typer.Option(min=0, help="The rank to trace.")] = 0,
    steps: Annotated[int, typer.Option(min=1, max=20, help="How many steps.")] = 2,
    timeout: Annotated[
        float, typer.Option(metavar="SECONDS", help="How long to wait for the trace.")
    ] = 600.0,
) -> int:
    """Trace some steps of a rank while the run goes on, and say where the trace is.

    Open it with https://ui.perfetto.dev or chrome://tracing. Those steps take longer.
    """
    run = RunDirectory(usable_path(run_dir))
    if not run.ledger.is_file():
        raise UsageError(f"{run.path} is not a run: it has no ledger.jsonl")
    reader = RunReader(run, patient=False)
    try:
        attempt = _live_attempt(reader, rank)
        mail = ProfileMail(run.attempt(attempt), rank)
        request, until = mail.ask(steps), time.monotonic() + timeout
        while (answer := mail.answered(request)) is None:
            if time.monotonic() > until:
                raise UsageError(
                    f"no trace after {timeout:.0f} s: look at `kempner status {run_dir}`, whether "
                    "the run makes steps"
                )
            if _live_attempt(reader, rank) != attempt:
                raise UsageError("the ranks were started again meanwhile; ask once more")
            time.sleep(_LOOK)
    except OSError as error:
        raise cannot_read(run.attempts, error) from error
    if answer.error:
        typer.echo(f"kempner: {answer.error}", err=True)
        return ExitCode.CRASHED
    for file in answer.files:
        typer.echo(run.path / file)
    return ExitCode.COMPLETED


def _live_attempt(reader: RunReader, rank: int) -> int:
    """The live attempt. Raises `UsageError` if the run does not train, or has no such rank, and
    `OSError`."""
    status = summarise(reader.read())
    if status.attempt is None or not status.doing.activity.is_live:
        raise UsageError(f"{reader.run.path} does not train now ({status.state}): nothing to trace")
    if rank >= status.attempt.ranks:
        raise UsageError(f"there is no rank {rank}: the run has {status.attempt.ranks}")
    return status.attempt.number
