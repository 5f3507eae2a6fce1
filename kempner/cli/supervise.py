"""`kempner supervise`: the daemon that launches, supervises and restarts the ranks; `kempner join`:
adds a node of another job to a run."""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kempner.cli.config import TAKES_OVERRIDES
from kempner.cli.usage import TakesCommand, overrides
from kempner.cluster.slurm.job import element, job_id, restart_count
from kempner.cluster.slurm.resources import detect
from kempner.config.errors import ConfigError
from kempner.config.loading import dumps, load
from kempner.config.resilience import refuse_absent_ranks
from kempner.config.sections import Config
from kempner.model.spec.mesh import resolve_mesh
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import DataError, ExitCode, UsageError
from kempner.run.process.retry import StorageUnavailableError, WaitStoppedError
from kempner.run.process.signals import inbox
from kempner.run.process.threads import unless
from kempner.run.record.identity import accepted_names, choose_run, refuse_other_command
from kempner.run.record.program import identity_of_words
from kempner.run.record.recorded_config import last_config
from kempner.run.record.run_dir import RUN_LINE, RunDirectory, name_of_command

if TYPE_CHECKING:
    from kempner.cluster.slurm.allocation import Allocation
    from kempner.supervisor.launchers.base import Program
    from kempner.supervisor.launchers.launcher import Launcher
    from kempner.supervisor.launchers.rank_runtime import RankRuntime
    from kempner.supervisor.slurm.job_monitor import JobMonitor

app = typer.Typer(rich_markup_mode=None)


class LauncherName(StrEnum):
    LOCAL = "local"
    SRUN = "srun"
    TORCHRUN = "torchrun"


LOOKED_WITHIN = 10.0
"""Seconds to check whether the run is complete. If storage hangs for longer, the run is started:
the start itself waits for storage."""

_NAMED = "kempner supervise --run.name=NAME -- COMMAND..."


FileArgument = Annotated[
    str | None,
    typer.Argument(metavar="CONFIG", help="Configuration in TOML; not needed for a COMMAND."),
]
NprocOption = Annotated[
    int | None, typer.Option(min=1, help="Ranks on this machine (local; 1 by default).")
]
LauncherOption = Annotated[
    LauncherName | None,
    typer.Option(
        help="Who starts the ranks: local, as children of this process; srun, by a Slurm step "
        "with an agent per node; torchrun, by a step with a torchrun per node. By default "
        "slurm.launcher: srun inside of a Slurm job, local elsewhere."
    ),
]
JobidOption = Annotated[
    str | None,
    typer.Option(help="Slurm allocation to train in; by default the one this command runs in."),
]


@app.command(cls=TakesCommand, context_settings=TAKES_OVERRIDES)
def supervise(
    context: typer.Context,
    file: FileArgument = None,
    nproc: NprocOption = None,
    launcher: LauncherOption = None,
    jobid: JobidOption = None,
) -> ExitCode:
    """Launch and supervise the ranks of CONFIG; then --section.key=value.

    `kempner supervise --run.name=NAME -- COMMAND...` does so for a program of your own. Its ranks
    get torch's variables (RANK, WORLD_SIZE, MASTER_ADDR, ...).

    Ctrl-C or SIGTERM stops after the current step with a checkpoint; the same command continues
    from there. A second Ctrl-C within two seconds exits at once. A Slurm job is requeued.
    """
    inbox().install()
    command: tuple[str, ...] = context.obj
    if jobid is None:
        from kempner.supervisor.slurm.setup import forget_other_jobs

        forget_other_jobs(os.environ)  # the run's name may depend on the job
    words = overrides(context, file, bool(command))
    config, given = _load_for_job(file, words, command, jobid)
    run = RunDirectory(Path(config.run.dir) / str(config.run.name))
    if (done := _is_complete(run, config, command)) is not None:
        return done
    chosen = launcher or choose_launcher(config.slurm.launcher, os.environ, nproc, jobid)
    if chosen is not LauncherName.LOCAL:
        if nproc is not None:
            raise UsageError("--nproc is for --launcher local; in a Slurm job set slurm.procs")
        return _in_a_job(run, command, config, jobid, given, chosen)
    if jobid is not None:
        raise UsageError("--jobid names a Slurm allocation: use it with --launcher srun")
    refuse_absent_ranks(config.resilience.faults, nproc or 1)
    resolve_mesh(config, nproc or 1)
    return _here(run, command, config, nproc or 1)


@contextmanager
def _never_paused() -> Iterator[bool]:
    logger().warning("Ctrl-Z has no effect, since the ranks run on other nodes; Ctrl-C stops them")
    yield False


def choose_launcher(
    configured: str, environ: Mapping[str, str], nproc: int | None, jobid: str | None
) -> LauncherName:
    """The launcher if the command line names none. In a Slurm job it is srun by default: a job for
    many GPUs must not silently train on one."""
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


def _here(run: RunDirectory, command: Sequence[str], config: Config, nproc: int) -> ExitCode:
    say(f"{RUN_LINE}{run.path}")  # before the imports, which take a while
    from kempner.supervisor.daemon import supervise as follow
    from kempner.supervisor.launchers.launcher import Launcher
    from kempner.supervisor.launchers.local import this_machine

    nodes, agent = this_machine(run, nproc)
    inbox().pause_within(agent.paused)
    return follow(run, Launcher(nodes, agent), _program(command, run, config), config, inbox())


def _program(
    command: Sequence[str], run: RunDirectory, config: Config, python: str = sys.executable
) -> Program:
    from kempner.supervisor.launchers.base import Program

    section = config.supervise
    if command:
        modules = section.fork_imports if section.fork else ()
        pattern = config.program.progress_pattern or ""
        return Program.of_user(command, modules, python, pattern)
    return Program.train([str(run.accepted)], section.fork, python)


def _in_a_job(
    run: RunDirectory,
    command: Sequence[str],
    config: Config,
    jobid: str | None,
    given: Sequence[str],
    chosen: LauncherName,
) -> ExitCode:
    from kempner.supervisor.daemon import supervise as follow

    find = partial(_find_place, run, command, jobid=jobid, given=given, chosen=chosen)
    try:
        step, program, monitor = find(config)
    except (UsageError, DataError) as error:
        if (before := _config_before(run, config, jobid, error)) is None:
            raise
        config = before
        step, program, monitor = find(config)
    return follow(run, step, program, config, inbox(), monitor)


def _find_place(
    run: RunDirectory,
    command: Sequence[str],
    config: Config,
    *,
    jobid: str | None,
    given: Sequence[str],
    chosen: LauncherName,
) -> tuple[Launcher, Program, JobMonitor]:
    from kempner.supervisor.launchers.rank_runtime import RankRuntime
    from kempner.supervisor.slurm import setup
    from kempner.supervisor.slurm.job_monitor import JobMonitor

    per_task, named = chosen is LauncherName.SRUN, jobid is not None
    if command and not per_task:
        raise UsageError("a command needs --launcher local or srun")
    if command and config.slurm.resubmit:
        raise UsageError("slurm.resubmit=true works with a configuration, not with a command")
    job = setup.find_job(os.environ, jobid)
    allocation, resources = setup.inspect_job(
        job, os.environ, config, given=named, per_task=per_task
    )
    runtime = RankRuntime.of(config.slurm, config.distributed.interface)
    program = _program(command, run, config, runtime.python)
    grows = per_task and config.supervise.grow and not (command or runtime.contained)
    step = _launcher(config, allocation, runtime, per_task, grows)
    meeting = setup.meeting_place(allocation, config, os.environ)
    restarts = restart_count(os.environ)
    say(setup.banner(allocation, resources, run, given, restarts, meeting))
    inbox().pause_within(_never_paused)
    stopped = lambda: bool(inbox().received)  # noqa: E731
    setup.check_runtime(runtime, config.slurm.setup, allocation, stopped)
    if allocation.batch:
        _check_changed(run, config, job, allocation.size)
    monitor = JobMonitor(job, allocation.batch, given if config.slurm.resubmit else None)
    return step, program, monitor


def _launcher(
    config: Config, allocation: Allocation, runtime: RankRuntime, per_task: bool, grows: bool
) -> Launcher:
    """A launcher with an agent on each node; with `grows`, also on nodes that join."""
    from kempner.supervisor.launchers.agents.step import SlurmAgents
    from kempner.supervisor.launchers.launcher import Launcher
    from kempner.supervisor.launchers.run_nodes import RunNodes
    from kempner.supervisor.slurm.setup import bound_here

    def fits(size: int) -> bool:
        try:
            resolve_mesh(config, size)
        except UsageError:
            return False
        return True

    nodes = RunNodes(allocation, config.supervise, fits if grows else None)
    agents = SlurmAgents(nodes, config.supervise, runtime)
    agents.bound |= bound_here(allocation, config, os.environ)
    step = Launcher(nodes, agents, torchrun=not per_task, contained=runtime.contained)
    refuse_absent_ranks(config.resilience.faults, allocation.size)
    resolve_mesh(config, allocation.size)
    return step


def _is_complete(run: RunDirectory, config: Config, command: Sequence[str]) -> ExitCode | None:
    """The exit code if the run is complete, and was started again unchanged; else None."""
    from kempner.supervisor.hooks import MetricsExports
    from kempner.supervisor.readiness import complete_before

    over = time.monotonic() + LOOKED_WITHIN
    look = partial(complete_before, config, run, command)
    if not (sentence := unless(lambda: time.monotonic() > over, look, "complete")):
        return None
    say(sentence)
    exports = MetricsExports()
    exports.start(run, config.metrics)  # export what is still missing
    exports.close(complete=True)
    return ExitCode.COMPLETED


def _load_for_job(
    file: str | None, words: list[str], command: Sequence[str], jobid: str | None
) -> tuple[Config, list[str]]:
    """As `_load`. If a requeued job finds a configuration that cannot be used, or that belongs to
    another run, it resumes with the last one that worked."""
    comes_back = file is not None and jobid is None and _own_job() is not None
    given = [*(() if file is None else (file,)), *words, *(("--", *command) if command else ())]
    error: Exception
    try:
        if file is not None and comes_back and restart_count(os.environ):
            await_saved(Path(file).expanduser())
        config, given = _load(file, words, command)
        run = RunDirectory(Path(config.run.dir) / str(config.run.name))
        if not comes_back or command or _comes_back(run, jobid) or not restart_count(os.environ):
            return config, given
        error = UsageError(f"{file} is the configuration of another run, {run.path}")
    except (ConfigError, OSError) as failure:
        if not comes_back:
            raise
        config, error = None, failure
    known = None if file is None else _run_of_job(file, words)
    before = None if known is None else _config_before(known, None, jobid, error)
    if before is not None:
        return before, given
    if config is None:
        raise error
    return config, given


UNCHANGED_FOR, SAVED_WITHIN = 5.0, 60.0
"""Seconds without a change after which a file counts as saved, and the most to wait for that."""


def await_saved(
    file: Path, now: Callable[[], float] = time.time, pause: Callable[[float], object] = time.sleep
) -> None:
    """Wait for an editor that may be saving the configuration. Raises `ConfigError` if it is empty
    afterwards; a missing file is left to `load`."""
    began, size = now(), 1
    with suppress(OSError):
        while now() - file.stat().st_mtime < UNCHANGED_FOR and now() - began < SAVED_WITHIN:
            pause(1.0)
        size = file.stat().st_size
    if not size:
        raise ConfigError(f"{file} is empty")


def _run_of_job(file: str, words: Sequence[str]) -> RunDirectory | None:
    from kempner.insight.status.job import find_run, knows_job
    from kempner.insight.status.runs import find_runs, places

    if (job := _own_job()) is None:
        return None
    named = [word.partition("=")[2] for word in words if word.startswith("--run.dir=")]
    with suppress(OSError):
        named += _DIR.findall(Path(file).read_text(errors="replace"))
    runs = find_runs([*map(Path, named), *places(Path.cwd())])
    if known := [run for run in runs if knows_job(run, job)]:
        return known[0]
    if not restart_count(os.environ):
        return None
    with suppress(UsageError):
        return find_run(job, runs)
    return None


_DIR = re.compile(r"^\s*(?:run\.)?dir\s*=\s*[\"'](.+?)[\"']", re.MULTILINE)
"""Finds `run.dir` in a file that may not be valid TOML."""


def _own_job() -> str | None:
    try:
        return job_id(os.environ)
    except ValueError:  # refused with a sentence later
        return None


def _comes_back(run: RunDirectory, jobid: str | None) -> bool:
    """Whether this job has run before, according to the run's ledger."""
    from kempner.insight.status.job import knows_job

    return jobid is None and (job := _own_job()) is not None and knows_job(run, job)


def _config_before(
    run: RunDirectory, now: Config | None, jobid: str | None, error: Exception
) -> Config | None:
    """The last configuration that worked, if this job has run before and that differs from the
    current one (`now`), which cannot be used because of `error`."""
    if not _comes_back(run, jobid):
        return None
    try:
        path = last_config(run)
        config = None if path is None else load(path)
    except (ConfigError, OSError):
        return None
    if config is None or config == now:
        return None
    logger().warning(
        f"{error}. This job has run before: it goes on with {path}, the configuration that worked "
        "last. CHANGES SINCE THEN HAVE NO EFFECT until the file is repaired and the job starts "
        "again"
    )
    return config


def _check_changed(run: RunDirectory, config: Config, job: str, size: int) -> None:
    """Check a configuration that has changed since this job last ran, while the old one can still
    be used. Raises `UsageError` and `DataError`; ignores storage that is away."""
    from kempner.insight.status.job import knows_job
    from kempner.supervisor.readiness import check_ready

    before = last_config(run)
    if before is None or not knows_job(run, job) or before.read_bytes() == dumps(config).encode():
        return
    with suppress(StorageUnavailableError, WaitStoppedError):
        check_ready(config, run)


def _load(
    file: str | None, overrides: list[str], command: Sequence[str]
) -> tuple[Config, list[str]]:
    """The configuration, and the arguments for it. Each element of a job array has its own run
    directory."""
    if file is None and not command:
        raise UsageError("name a configuration, or a command after `--`")
    if file is not None and file.startswith("--") and command:
        overrides = [file, *overrides]  # the first override, not a file
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
    """The run's name: the configured one, or one derived from `command`. Raises `UsageError` if the
    configured run belongs to another command."""
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


RanksOption = Annotated[
    int | None,
    typer.Option(
        min=1, help="Ranks that this node has room for; by default one per GPU, or task, of it."
    ),
]
WaitOption = Annotated[
    float, typer.Option(min=0, metavar="SECONDS", help="How long to wait for a supervisor.")
]


@app.command()
def join(
    directory: Annotated[Path, typer.Argument(metavar="RUN_DIR", help="The run's directory.")],
    ranks: RanksOption = None,
    wait: WaitOption = 600.0,
) -> ExitCode:
    """Have this node take part in a run that another Slurm job supervises.

    The run starts again on more nodes, without losing a step, and on fewer before this job's time
    is over. Then this job goes back into the queue, to join again; once the run is complete, it
    ends.
    """
    inbox().install()
    from kempner.cluster.machine import JobPlace, find_place
    from kempner.supervisor.joining import Joiner
    from kempner.supervisor.slurm.job_monitor import JobMonitor
    from kempner.supervisor.slurm.setup import forget_other_jobs

    if not directory.is_dir():
        raise UsageError(f"there is no run directory {directory}")
    forget_other_jobs(os.environ)
    try:
        job = job_id(os.environ)
        room = (
            ranks
            or detect(os.environ).gpus.value
            or int(os.environ.get("SLURM_NTASKS_PER_NODE") or "1")
        )
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
