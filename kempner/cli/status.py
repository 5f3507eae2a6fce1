"""`kempner status`: state of a run, or of the run of a Slurm job."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer

from kempner.insight.job import find_run, read_job
from kempner.insight.status import read_status
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
    """Show the state of a run: step, loss, newest checkpoint, and step and phase of each rank.

    For a Slurm job also how often it was requeued, by launch, scontrol and sacct.
    """
    job = target if re.fullmatch(r"\d+(_\d+)?", target) and not Path(target).exists() else None
    run = RunDirectory(Path(target)) if job is None else find_run(job, Path("runs"))
    if not run.ledger.exists():
        raise UsageError(
            f"{target} is not a run: it has no ledger.jsonl; name <run.dir>/<run.name>, or a job id"
        )
    history = RunHistory.read(run.ledger)
    found = read_status(run, history)
    rows = {
        "run": run.path,
        **({} if job is None else read_job(job, history).rows()),
        "state": found.state if found.gave_up is None else f"given up, see {run.gave_up}",
        "step": found.step,
        "loss": found.loss,
        "latest checkpoint": found.latest_checkpoint,
        "attempts": found.attempts,
        **dict(found.ranks),
    }
    for name, value in rows.items():
        typer.echo(f"{name:<18} {'-' if value is None else value}")
    if found.gave_up is not None:
        typer.echo(found.gave_up)
