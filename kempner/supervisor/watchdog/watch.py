"""The watchdog of a job: puts it back into the queue where its supervisor does not.

It begins with the job, has all that it needs in memory, and from then on touches no file: it goes
on working while home, environment and run directory are frozen. Each command of Slurm is started by
a descriptor that was opened at the beginning, from a child that it does not wait for longer than
`TRY`, since a child may hang. What is decided is decided by pure functions."""

from __future__ import annotations

import errno
import gc
import math
import os
import re
import select
import shutil
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from enum import Enum

from kempner.cluster.machine import JobPlace, find_place, lock_memory
from kempner.cluster.slurm.command import (
    CommandAnswer,
    SlurmError,
    SlurmSilentError,
    ask,
    client_environment,
    execute_by,
    judge,
)
from kempner.cluster.slurm.job import JobState, job_fields, job_id, parse_job, restart_count
from kempner.cluster.slurm.scontrol import (
    RequeueDecision,
    RequeueOutcome,
    SlurmAccess,
    cluster_settings,
    put_back,
    signal_tasks,
)
from kempner.supervisor.watchdog.board import JobBoard, SupervisorStage, WatchdogVerdict

LOOK_EVERY = 1.0
"""Seconds between two looks at the board."""

ASK_EVERY = 2.0
"""Seconds between two questions whether the ranks of a supervisor that has died are gone."""

SHARE = 0.4
"""Of the margin at the job's end, the last share: the supervisor has had the rest."""

SHORTEST = 5.0
"""Seconds before the job's end at which the watchdog acts at the latest, if the end is known."""

STARTS_WITHIN = 60.0
"""Seconds after which a supervisor that still starts may be stuck: then the end of the job is asked
for here."""

TRY = 10.0
"""Seconds for one command: a child that hangs costs no more."""

LATE = 600.0
"""Seconds after the end of a job for which to go on trying, as the supervisor does."""

MAX_FRUITLESS = 3
"""Times in a row that a job may come back without a new step, as for the supervisor."""

MAX_KILLED_STARTS = 10
"""The same of one whose supervisor is killed as it starts, which says nothing of the run: what
fails for some minutes, as memory that others take, does not end it."""

_OWN_FAULT = frozenset(
    {
        signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT,
        signal.SIGSYS, signal.SIGTRAP,
    }
)  # fmt: skip


class Act(Enum):
    WAIT = "wait"
    ASK_FOR_END = "ask when the job ends"
    ASK_FOR_RANKS = "ask whether ranks are left"
    STOP_RANKS = "ask the ranks to stop"
    REQUEUE = "have the job put back"
    REST = "leave the job alone, for good"


@dataclass(frozen=True)
class Sight:
    """What the watchdog knows at a moment.

    `stage`, `fruitless` (as `JobBoard` has it) and `advanced` are the supervisor's, `status` as
    wait(2) has it, None while it lives. `left` are the seconds until the job's end, infinite
    without one. `ranks` says whether any are there: None if Slurm has not said so since the
    supervisor died."""

    stage: SupervisorStage
    status: int | None
    left: float
    margin: float
    fruitless: int = 0
    advanced: bool = False
    ranks: bool | None = None
    since: float = 0.0
    asked: bool = False


def last_moment(margin: float) -> float:
    """Seconds before the job's end at which the watchdog acts whatever the supervisor does."""
    return max(SHORTEST, SHARE * margin)


def next_act(sight: Sight) -> Act:
    """What to do now.

    A supervisor that lives has until the last moment. One that has died leaves ranks, which are
    asked to stop, and have until then, too. One that fails by itself before it follows ranks would
    fail again; that it was killed is no reason to lose the job."""
    if sight.stage is SupervisorStage.SETTLED:
        return Act.REST
    starting, lives = sight.stage is SupervisorStage.STARTING, sight.status is None
    if starting and sight.status is not None and not was_killed(sight.status):
        return Act.REST
    if sight.left <= last_moment(sight.margin):
        return Act.REQUEUE
    if lives:
        stuck = starting and sight.since > STARTS_WITHIN and not sight.asked
        return Act.ASK_FOR_END if stuck else Act.WAIT
    if sight.ranks is False:
        return Act.REQUEUE
    return Act.STOP_RANKS if sight.ranks and not sight.asked else Act.ASK_FOR_RANKS


def was_killed(status: int) -> bool:
    """Whether a process was ended by a signal from outside, and not by a fault of its own."""
    return os.WIFSIGNALED(status) and os.WTERMSIG(status) not in _OWN_FAULT


def decide_for_supervisor(sight: Sight, restarts: int, job: JobState) -> RequeueDecision:
    """Whether to put back a job that was just looked at; `restarts` is how often it was when this
    launch began.

    Only one that runs or is at its time limit: asked to requeue one that was cancelled, Slurm
    brings it back to life."""
    if sight.stage is SupervisorStage.SETTLED:
        return RequeueDecision(False, "the supervisor has settled what becomes of the job")
    if restarts != job.restarts:
        return RequeueDecision(False, "the job was started again: it continues there")
    if not job.may_go_back:
        return RequeueDecision(False, f"the job is {job.state}: Slurm decides what becomes of it")
    if not job.may_requeue:
        return RequeueDecision(False, "the job was submitted with --no-requeue", refused=True)
    starting = sight.stage is SupervisorStage.STARTING
    most = MAX_KILLED_STARTS if starting else MAX_FRUITLESS
    if sight.fruitless >= most and not sight.advanced and job.times.preempt is None:
        why = f"the job came back {sight.fruitless} times without a new step"
        if starting:
            why = f"the supervisor was killed in {sight.fruitless + 1} starts in a row"
        return RequeueDecision(False, f"{why}: look at why, then submit it again")
    lost = "does not respond" if sight.status is None else "has died"
    return RequeueDecision(True, f"the supervisor {lost}: requeueing the job")


def ranks_left(steps: Sequence[str]) -> bool | None:
    """Whether steps other than the batch script's and Slurm's own are among those of a job; None if
    that is no whole answer: this process's own step is always there."""
    if "batch" not in steps:
        return None
    return any(name not in ("batch", "extern", "interactive") for name in steps)


class Commands:
    """Starts Slurm's commands by descriptors, with an environment in which nothing leads to
    storage."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._what = {name: _opened(name, environ) for name in ("scontrol", "scancel")}
        variables = client_environment(environ)
        self._environ = {
            name: value for name, value in variables.items() if not name.startswith("LD_")
        }
        if self.run(["scontrol", "--version"]).status != 0:
            self._environ = variables  # it finds its libraries by these variables

    def run(
        self,
        command: Sequence[str],
        environ: Mapping[str, str] | None = None,
        cwd: str | None = None,
    ) -> CommandAnswer:
        """As `command.ask` runs one. Raises `SlurmSilentError` where no child can be made."""
        try:
            (out, to_out), (err, to_err) = os.pipe2(os.O_CLOEXEC), os.pipe2(os.O_CLOEXEC)
            child = os.fork()
        except OSError as error:
            raise SlurmSilentError(f"scontrol cannot be started: {error.strerror}") from error
        if child == 0:
            self._become(command, to_out, to_err)
        os.close(to_out)
        os.close(to_err)
        try:
            return _hear(child, out, err)
        finally:
            os.close(out)
            os.close(err)

    def _become(self, command: Sequence[str], out: int, err: int) -> None:
        try:
            os.setsid()
            signal.pthread_sigmask(signal.SIG_SETMASK, ())
            os.dup2(out, 1)
            os.dup2(err, 2)
            os.execve(self._what[command[0]], list(command), self._environ)
        finally:
            os._exit(127)


def _opened(name: str, environ: Mapping[str, str]) -> int | str:
    """A descriptor of a command, or its path where that is needed."""
    path = shutil.which(name, path=environ.get("PATH")) or name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return path
    if os.pread(descriptor, 2, 0) != b"#!":
        return descriptor
    os.close(descriptor)
    return path  # its interpreter opens it by name


def _hear(child: int, out: int, err: int) -> CommandAnswer:
    """What a child prints, for `TRY` seconds; one that hangs is killed and left behind."""
    until, output = time.monotonic() + TRY, {out: b"", err: b""}
    poll = select.poll()
    for end in output:
        poll.register(end, select.POLLIN)
    open_ends = 2
    while open_ends and (left := until - time.monotonic()) > 0:
        for end, _ in poll.poll(1000 * left):
            chunk = os.read(end, 65536)
            output[end] += chunk
            if not chunk:
                poll.unregister(end)
                open_ends -= 1
    status = _reap(child, until)
    texts = [output[end].decode("utf-8", "replace") for end in (out, err)]
    return CommandAnswer(status, *texts) if status is not None else CommandAnswer(None, "")


def _reap(child: int, until: float) -> int | None:
    while True:
        gone, status = os.waitpid(child, os.WNOHANG)
        if gone:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
            return None
        time.sleep(0.01)


def _steps(job: str) -> bool | None:
    read = lambda text: re.findall(r"^StepId=\S+\.(\w+)", text, re.MULTILINE)  # noqa: E731
    return ranks_left(ask(["scontrol", "show", "step", "-o", job], read))


def _end_of(job: JobState) -> float | None:
    ahead = cluster_settings(within=0.0).ahead
    return None if ahead is None or job.times.end is None else job.times.end - ahead


@dataclass(frozen=True)
class WatchMeans:
    """How to ask Slurm and to wait; tests have their own. `clock` is in seconds."""

    access: SlurmAccess = field(default_factory=SlurmAccess)
    ranks: Callable[[str], bool | None] = _steps
    end_of: Callable[[JobState], float | None] = _end_of
    stop_ranks: Callable[[str], None] = signal_tasks
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep


@dataclass(frozen=True)
class JobLaunch:
    """One launch of a job: `id` by which to speak of it, `number` by which to speak of its steps,
    and how often it was put back before."""

    id: str
    number: str
    restarts: int


class Watchdog:
    def __init__(self, board: JobBoard, launch: JobLaunch, means: WatchMeans | None = None) -> None:
        self._board, self._launch, self._means = board, launch, means or WatchMeans()
        self._ranks: bool | None = None
        self._since = self._means.clock()
        self._lives, self._asked = True, False

    def sight(self) -> Sight:
        board, now = self._board, self._means.clock()
        if self._lives and board.status is not None:
            self._lives, self._asked, self._since = False, False, now
        return Sight(
            board.stage,
            board.status,
            board.ends_at - now,
            board.margin,
            board.fruitless,
            board.advanced,
            self._ranks,
            now - self._since,
            self._asked,
        )

    def follow(self) -> None:
        """Until the job is in the queue again, or must not be put there."""
        while not self.do(next_act(self.sight())):
            pass

    def do(self, act: Act) -> bool:
        try:
            match act:
                case Act.REQUEUE:
                    return self._put_back()
                case Act.REST if self._board.status is not None:
                    return True
                case Act.ASK_FOR_END:
                    self._learn_end()
                    self._asked = True
                case Act.ASK_FOR_RANKS:
                    self._ranks = self._means.ranks(self._launch.number)
                case Act.STOP_RANKS:
                    self._ranks = None  # they may leave, or Slurm may say that they cannot be asked
                    self._means.stop_ranks(self._launch.id)
                    self._asked = True
        except SlurmError:
            pass  # it is asked again, and the job's end is known
        self._means.pause(LOOK_EVERY if self._board.status is None else ASK_EVERY)
        return False

    def _put_back(self) -> bool:
        """Have the job put back; whether that is over."""
        if self._has_more_time():
            return False
        now = self._means.clock()
        until = LATE + (self._board.ends_at if now < self._board.ends_at < math.inf else now)
        decide = lambda job: decide_for_supervisor(  # noqa: E731
            self.sight(), self._launch.restarts, job
        )
        end = put_back(self._launch.id, decide, until, means=self._means.access)
        done = end.outcome is RequeueOutcome.DONE
        self._board.tell_verdict(
            WatchdogVerdict.REQUEUED if done else WatchdogVerdict.LEFT, end.reason
        )
        return True

    def _has_more_time(self) -> bool:
        """Whether the job's end was moved since a supervisor that does not respond looked at it."""
        if self._board.status is not None or self._board.end == math.inf:
            return False
        try:
            job = self._means.access.look(self._launch.id)
        except SlurmError:
            return False
        later = (job.times.end or math.inf) - self._board.end
        if not job.running or later <= 0:
            return False
        self._board.tell_end(self._board.ends_at + later, self._board.end + later)
        return next_act(self.sight()) is not Act.REQUEUE

    def _learn_end(self) -> None:
        job = self._means.access.look(self._launch.id)
        self._board.tell_end(self._means.end_of(job), job.times.end)


def watch(board: JobBoard, environ: Mapping[str, str]) -> None:
    """What the watchdog does, from its beginning to its end."""
    job = job_id(environ)
    if job is None or find_place(environ) is not JobPlace.BATCH_SCRIPT:
        return
    execute_by(Commands(environ).run)
    _rehearse()
    gc.collect()
    gc.disable()
    lock_memory()
    Watchdog(board, JobLaunch(job, environ["SLURM_JOB_ID"], restart_count(environ))).follow()


def _rehearse() -> None:
    """Go once through what is to be done in need: nothing is then loaded for the first time."""
    shown = "JobId=1 JobState=RUNNING Restarts=0 Requeue=1 EndTime=2026-01-01T00:00:00\n"
    ended = replace(parse_job(job_fields(shown)), state="COMPLETING")
    sight = Sight(SupervisorStage.FOLLOWS, None, math.inf, 0.0)
    access = SlurmAccess(look=lambda job: ended, requeue=lambda job: None)
    put_back("1", lambda job: decide_for_supervisor(sight, 0, job), 0.0, means=access)
    judge(CommandAnswer(1, "", os.strerror(errno.EIO)))
