"""`kempner supervise`: the daemon."""

from __future__ import annotations

import os
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kempner.cli.config import TAKES_OVERRIDES, ConfigFile
from kempner.cluster.job import restart_count
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.run import logs
from kempner.run.exit_codes import ExitCode, UsageError
from kempner.run.layout import RunDirectory
from kempner.run.signals import inbox
from kempner.supervisor.entering import element, enter, find_job, introduction
from kempner.supervisor.local import LocalLauncher
from kempner.supervisor.slurm_job import SlurmJob
from kempner.supervisor.step import StepLauncher, TorchrunLauncher
from kempner.supervisor.supervise import supervise as follow


class LauncherName(StrEnum):
    """Who starts the ranks."""

    LOCAL = "local"
    SRUN = "srun"
    TORCHRUN = "torchrun"


def register(app: typer.Typer) -> None:
    """Adds `supervise` to `app`."""
    app.command(context_settings=TAKES_OVERRIDES)(supervise)


def supervise(
    context: typer.Context,
    file: ConfigFile,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine (local; 1 when left out).")
    ] = None,
    launcher: Annotated[
        LauncherName | None,
        typer.Option(
            help="Who starts the ranks: local, as children of this process; srun, as a Slurm step "
            "with a task per GPU; torchrun, as a step with a torchrun per node. As slurm.launcher "
            "says when left out."
        ),
    ] = None,
    jobid: Annotated[
        str | None, typer.Option(help="The allocation to train in, if not the one around us.")
    ] = None,
) -> ExitCode:
    """Launch the ranks of CONFIG (then --section.key=value), follow them, and say how it ended.

    Ctrl-C or SIGTERM stops after the current step with a checkpoint; the same command goes on from
    there. A second Ctrl-C within two seconds leaves at once. In a Slurm job the job goes back into
    the queue.
    """
    inbox().install()
    logs.configure()
    config, overrides = _load(file, context.args)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    arguments = [str(file), *overrides]
    chosen = launcher or LauncherName(config.slurm.launcher)
    if chosen is LauncherName.LOCAL:
        if jobid is not None:
            raise UsageError("--jobid names a Slurm allocation: use it with --launcher srun")
        size = nproc or 1
        local = LocalLauncher(run, size)
        return follow(run, local, arguments, config, inbox())
    if nproc is not None:
        raise UsageError("--nproc is for --launcher local; in a Slurm job set slurm.procs")
    job = find_job(os.environ, jobid)
    per_task = chosen is LauncherName.SRUN
    allocation, resources = enter(
        job, os.environ, config, given=jobid is not None, per_task=per_task
    )
    step = (StepLauncher if per_task else TorchrunLauncher)(allocation, config.supervise)
    restarts = restart_count(os.environ)
    print(introduction(allocation, resources, run, arguments, restarts), flush=True)
    again = arguments if config.slurm.resubmit else None
    around = SlurmJob(job, allocation.batch, again)
    return follow(run, step, arguments, config, inbox(), around)


def _load(file: Path, overrides: list[str]) -> tuple[Config, list[str]]:
    """The configuration; each element of a job array trains in a run directory of its own."""
    config = load(file, overrides)
    if suffix := element(os.environ):
        overrides = [*overrides, f"--run.name={config.run.name}{suffix}"]
        config = load(file, overrides)
    return config, overrides
