"""`kempner stop`: stops a run with a checkpoint, and without a requeue."""

from __future__ import annotations

import time
from typing import Annotated

import typer

from kempner.cli.insight.target import RUN, RUN_METAVAR, is_job, run_of
from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import JobWatch, job_of
from kempner.insight.status.runs import RunFollower
from kempner.insight.status.summary import Status
from kempner.run.process.exit_codes import ExitCode, RunError, UsageError, cannot_write
from kempner.run.record.lease import ask_to_stop
from kempner.run.record.run_dir import RunDirectory

app = typer.Typer(rich_markup_mode=None)

_LOOK = 0.5  # seconds between two looks at the run


@app.command()
def stop(
    target: Annotated[str, typer.Argument(metavar=RUN_METAVAR, help=RUN)],
    wait: Annotated[
        bool, typer.Option("--wait/--no-wait", help="Wait until it has stopped.")
    ] = True,
) -> ExitCode:
    """Stop a run for good: after its step, with a checkpoint; its job is not requeued.

    Works from any machine that sees the run's directory. A run whose job waits in the queue is
    taken out of it. Start the same command again to continue.
    """
    if is_job(target) and _is_cancelled_in_queue(target, began=False):
        typer.echo(f"job {target} had not begun: it is cancelled")
        return ExitCode.COMPLETED
    run = run_of(target)
    follower = RunFollower(run, JobWatch(None, wait=True), patient=True)
    status = follower.read()
    if status.doing.activity is Activity.QUEUED:
        return _cancel(run, status)
    if not _works(status.doing.activity):
        typer.echo(f"{run.path} does not run: {status.state}; there is nothing to stop")
        return ExitCode.COMPLETED
    asked = _ask(run)
    typer.echo(
        f"{run.path}: {'asked' if asked else 'was asked already'} to stop after its step, with a "
        "checkpoint"
    )
    if not wait:
        typer.echo(f"`kempner status {run.path}` shows when it has")
        return ExitCode.COMPLETED
    return _wait(run, follower)


def _works(activity: Activity) -> bool:
    return activity.is_live or activity is Activity.UNKNOWN


def _is_cancelled_in_queue(job: str, *, began: bool) -> bool:
    """Cancel a job that waits for its first start or, if it `began` before, for a restart; returns
    whether it was waiting. False also if Slurm does not answer."""
    try:
        state = scontrol.job_state(job)
        if not state.queued or began is not (state.restarts > 0):
            return False
        scontrol.cancel(job)
    except SlurmError:
        return False
    return True


def _ask(run: RunDirectory) -> bool:
    """Ask the run to stop; False if it was asked before. Raises `RunError`."""
    try:
        return ask_to_stop(run.supervisors)
    except OSError as error:
        raise cannot_write(run.supervisors, error) from error


def _cancel(run: RunDirectory, status: Status) -> ExitCode:
    job = job_of(status.facts.history)
    if job is None:
        raise UsageError(f"{run.path} waits in a queue, but its job is not known")
    try:
        scontrol.cancel(job)
    except SlurmError as error:
        raise RunError(f"job {job} waits in the queue, and cannot be cancelled: {error}") from error
    typer.echo(f"job {job} was in the queue, and is cancelled; {_continues(status)}")
    return ExitCode.COMPLETED


def _wait(run: RunDirectory, follower: RunFollower) -> ExitCode:
    """Wait until the run is over; asks a new supervisor, too."""
    while True:
        time.sleep(_LOOK)
        status = follower.read()
        activity = status.doing.activity
        if activity is Activity.QUEUED:
            return _cancel(run, status)
        if not _works(activity):
            break
        _ask(run)
    job = job_of(status.facts.history)
    if job is not None and _is_cancelled_in_queue(job, began=True):
        typer.echo(f"job {job}, which Slurm itself had requeued, is cancelled")
    if activity is Activity.STOPPED:
        typer.echo(f"stopped; {_continues(status)}")
        return ExitCode.COMPLETED
    typer.echo(f"{run.path}: {status.state}")
    return ExitCode.COMPLETED if activity is Activity.DONE else ExitCode.CRASHED


def _continues(status: Status) -> str:
    checkpoint = status.facts.checkpoint
    where = "from its beginning" if checkpoint is None else f"after step {checkpoint.step}"
    return f"the same command as before (sbatch, kempner supervise) continues {where}"
