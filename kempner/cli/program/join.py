"""`kempner join`: a node of another job takes part in a run."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from kempner.cluster.slurm.job import job_id
from kempner.cluster.slurm.resources import detect
from kempner.run.output import logs
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.signals import inbox
from kempner.run.record.run_dir import RunDirectory


def register(app: typer.Typer) -> None:
    app.command()(join)


def join(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    ranks: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks that this node has room for; by default one per GPU, or task, of it."
        ),
    ] = None,
    wait: Annotated[
        float,
        typer.Option(min=0, metavar="SECONDS", help="How long to wait for a supervisor."),
    ] = 600.0,
) -> ExitCode:
    """Have this node take part in a run that another Slurm job supervises.

    The run starts again on more nodes, without losing a step, and on fewer before this job's time
    is over. Then this job goes back into the queue, to join again; once the run is complete, it
    ends.
    """
    inbox().install()
    logs.configure()
    from kempner.cluster.machine.job_place import JobPlace, find_place
    from kempner.supervisor.joining import Joiner
    from kempner.supervisor.slurm.job_monitor import JobMonitor
    from kempner.supervisor.slurm.setup import forget_other_jobs

    if not directory.is_dir():
        raise UsageError(f"there is no run directory {directory}")
    forget_other_jobs(os.environ)
    try:
        job = job_id(os.environ)
        room = ranks or detect(os.environ).gpus.value or _tasks()
    except ValueError as error:
        raise UsageError(str(error)) from error
    batch = job is not None and find_place(os.environ) is JobPlace.BATCH_SCRIPT
    if batch and int(os.environ.get("SLURM_JOB_NUM_NODES") or "1") > 1:
        raise UsageError(
            f"job {job} has several nodes, and this is one of them: submit one job per node, or "
            "start it on all of them with `srun --ntasks-per-node=1 kempner join RUN_DIR`"
        )
    monitor = None if job is None else JobMonitor(job, batch)
    return Joiner(RunDirectory(directory), room, monitor, inbox(), wait).run()


def _tasks() -> int:
    """Ranks of a node without GPUs."""
    return int(os.environ.get("SLURM_NTASKS_PER_NODE") or "1")
