"""`kempner supervise`: the daemon that launches, supervises and restarts the ranks."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kempner.cli.config import TAKES_OVERRIDES
from kempner.cli.usage import TakesCommand, overrides
from kempner.cluster.slurm.job import element, restart_count
from kempner.config.fault_spec import refuse_absent_ranks
from kempner.config.loading import load
from kempner.config.sections import Config
from kempner.model.spec.mesh import resolve_mesh
from kempner.run.output import logs
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.signals import inbox
from kempner.run.record.identity import accepted_names
from kempner.run.record.naming import choose_run, refuse_other_command
from kempner.run.record.program import identity_of_words
from kempner.run.record.run_dir import RUN_LINE, RunDirectory, name_of_command

if TYPE_CHECKING:
    from kempner.supervisor.launchers.base import Program


class LauncherName(StrEnum):
    """What starts the ranks."""

    LOCAL = "local"
    SRUN = "srun"
    TORCHRUN = "torchrun"


_NAMED = "kempner supervise --run.name=NAME -- COMMAND..."


def register(app: typer.Typer) -> None:
    app.command(cls=TakesCommand, context_settings=TAKES_OVERRIDES)(supervise)


def supervise(
    context: typer.Context,
    file: Annotated[
        str | None,
        typer.Argument(metavar="CONFIG", help="Configuration in TOML; not needed for a COMMAND."),
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks on this machine (local; 1 by default).")
    ] = None,
    launcher: Annotated[
        LauncherName | None,
        typer.Option(
            help="Who starts the ranks: local, as children of this process; srun, by a Slurm step "
            "with an agent per node; torchrun, by a step with a torchrun per node. By default "
            "slurm.launcher: srun inside of a Slurm job, local elsewhere."
        ),
    ] = None,
    jobid: Annotated[
        str | None,
        typer.Option(help="Slurm allocation to train in; by default the one this command runs in."),
    ] = None,
) -> ExitCode:
    """Launch and supervise the ranks of CONFIG; then --section.key=value.

    `kempner supervise --run.name=NAME -- COMMAND...` does so for a program of your own. Its ranks
    get torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    Ctrl-C or SIGTERM stops after the current step with a checkpoint; the same command continues
    from there. A second Ctrl-C within two seconds exits at once. A Slurm job is requeued.
    """
    inbox().install()
    logs.configure()
    command: tuple[str, ...] = context.obj
    if jobid is None:
        from kempner.supervisor.slurm.setup import forget_other_jobs

        forget_other_jobs(os.environ)  # it names the run
    config, given = _load(file, overrides(context, file, bool(command)), command)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    chosen = launcher or choose_launcher(config.slurm.launcher, os.environ, nproc, jobid)
    if chosen is not LauncherName.LOCAL:
        if nproc is not None:
            raise UsageError("--nproc is for --launcher local; in a Slurm job set slurm.procs")
        return _in_a_job(run, command, config, jobid, given, chosen)
    if jobid is not None:
        raise UsageError("--jobid names a Slurm allocation: use it with --launcher srun")
    refuse_absent_ranks(config.resilience.faults, nproc or 1)
    resolve_mesh(config, nproc or 1)
    return _here(run, command, config, given, nproc or 1)


@contextmanager
def _never_paused() -> Iterator[bool]:
    """For ranks on other nodes, which would miss this process."""
    logger().warning("Ctrl-Z has no effect, since the ranks run on other nodes; Ctrl-C stops them")
    yield False


def choose_launcher(
    configured: str, environ: Mapping[str, str], nproc: int | None, jobid: str | None
) -> LauncherName:
    """The launcher where the command line names none.

    A job that was submitted to train on all of its GPUs must not silently train on one, unwatched.
    """
    if configured != "auto":
        return LauncherName(configured)
    job = jobid or environ.get("SLURM_JOB_ID")
    if not job:
        return LauncherName.LOCAL
    if nproc is not None and jobid is None:
        logger().warning(
            f"the {nproc} ranks of --nproc are children of this process: job {job} is neither "
            "watched nor requeued (--launcher srun would do that)"
        )
        return LauncherName.LOCAL
    logger().warning(f"in job {job}: starting the ranks with srun (--launcher srun)")
    return LauncherName.SRUN


def _here(
    run: RunDirectory, command: Sequence[str], config: Config, given: Sequence[str], nproc: int
) -> ExitCode:
    say(f"{RUN_LINE}{run.path}")  # before the imports, which take a while
    from kempner.supervisor.daemon import supervise as follow
    from kempner.supervisor.launchers.local import LocalLauncher

    local = LocalLauncher(run, nproc)
    inbox().pause_within(local.paused)
    return follow(run, local, _program(command, given, config), config, inbox())


def _program(
    command: Sequence[str], given: Sequence[str], config: Config, python: str = sys.executable
) -> Program:
    """What each rank runs."""
    from kempner.supervisor.launchers.base import Program

    section = config.supervise
    if command:
        modules = section.fork_imports if section.fork else ()
        pattern = config.program.progress_pattern or ""
        return Program.of_user(command, modules, python, pattern)
    return Program.train(given, section.fork, python)


def _in_a_job(
    run: RunDirectory,
    command: Sequence[str],
    config: Config,
    jobid: str | None,
    given: Sequence[str],
    chosen: LauncherName,
) -> ExitCode:
    """Find and print the resources of the Slurm job, then train in it."""
    from kempner.supervisor.daemon import supervise as follow
    from kempner.supervisor.launchers.agents.affinity import why_no_agents
    from kempner.supervisor.launchers.agents.joined.launcher import PoolLauncher
    from kempner.supervisor.launchers.agents.launcher import AgentLauncher
    from kempner.supervisor.launchers.srun import SrunLauncher, TorchrunLauncher
    from kempner.supervisor.launchers.surroundings import Surroundings
    from kempner.supervisor.slurm.job_monitor import JobMonitor
    from kempner.supervisor.slurm.setup import (
        bound_here,
        check_surroundings,
        enter,
        find_job,
        introduction,
        meeting_place,
    )

    per_task = chosen is LauncherName.SRUN
    if command and not per_task:
        raise UsageError("a command needs --launcher local or srun")
    if command and config.slurm.resubmit:
        raise UsageError("slurm.resubmit=true works with a configuration, not with a command")
    job = find_job(os.environ, jobid)
    allocation, resources = enter(
        job, os.environ, config, given=jobid is not None, per_task=per_task
    )
    around = Surroundings.of(config.slurm, config.distributed.interface)
    program = _program(command, given, config, around.python)
    launcher: type[SrunLauncher] = SrunLauncher if per_task else TorchrunLauncher
    by_agents = program.modules or allocation.why_no_tasks or (command and config.supervise.fork)
    if per_task and by_agents:
        if why := why_no_agents(config.supervise, os.environ, around):
            lacks = "forked" if program.modules else "watched by agents, nor what they print"
            logger().warning(f"the ranks are not {lacks}: {why}")
        else:
            launcher = AgentLauncher
    step = launcher(allocation, config.supervise, around)
    if launcher is AgentLauncher and config.supervise.grow and not (command or around.contained):
        step = PoolLauncher(allocation, config.supervise, around, partial(_fits, config))
    step.bound |= bound_here(allocation, config, os.environ)
    refuse_absent_ranks(config.resilience.faults, step.size)
    resolve_mesh(config, step.size)
    restarts = restart_count(os.environ)
    meeting = meeting_place(allocation, config, os.environ)
    say(introduction(allocation, resources, run, given, restarts, meeting))
    inbox().pause_within(_never_paused)
    stopped = lambda: bool(inbox().received)  # noqa: E731
    check_surroundings(around, config.slurm.setup, allocation, stopped)
    monitor = JobMonitor(job, allocation.batch, given if config.slurm.resubmit else None)
    return follow(run, step, program, config, inbox(), monitor)


def _fits(config: Config, size: int) -> bool:
    """Whether `size` ranks can form the mesh of a configuration."""
    try:
        resolve_mesh(config, size)
    except UsageError:
        return False
    return True


def _load(
    file: str | None, overrides: list[str], command: Sequence[str]
) -> tuple[Config, list[str]]:
    """The configuration, and the arguments that it came from.

    Each element of a job array trains in a run directory of its own.
    """
    if file is None and not command:
        raise UsageError("name a configuration, or a command after `--`")
    if file is not None and file.startswith("--") and command:
        overrides = [file, *overrides]  # the first of them, where a file could have been
        file = None
    path = None if file is None else Path(file)
    config = load(path, overrides, logger().warning)
    wanted = _name_run(config, command)
    if wanted != config.run.name:
        others = [given for given in overrides if not given.startswith("--run.name=")]
        overrides = [*others, f"--run.name={wanted}"]
        config = load(path, overrides)
    words = overrides if file is None else [file, *overrides]
    return config, [*words, "--", *command] if command else words


def _name_run(config: Config, command: Sequence[str]) -> str:
    """The name of the run: the configured one, or one that belongs to `command`.

    Raises `UsageError` if the configured one is that of another command.
    """
    given, suffix = config.run.name, element(os.environ)
    if not command:
        return f"{given}{suffix}"
    usual = Path(config.run.dir) / f"{given or name_of_command(command, _NAMED)}{suffix}"
    program = identity_of_words(command, os.environ, Path.cwd())
    accepted = accepted_names((), os.environ)
    if given:
        refuse_other_command(usual, program, accepted)
        return usual.name
    chosen = choose_run(usual, program, accepted)
    if chosen.sentence:
        say(chosen.sentence)
    return chosen.path.name
