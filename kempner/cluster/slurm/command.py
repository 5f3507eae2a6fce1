"""Runs one command of Slurm, and distinguishes answers, refusals and silence.

Slurm may be unavailable: a controller that restarts or fails over for minutes, a database for
hours; a busy one drops requests, and a fork fails while memory is short. All of that passes, so
commands are retried (`patiently`); only a refusal is final. What counts is a command's output, not
its exit code: empty or truncated output is no answer.

Do not call from a signal handler."""

from __future__ import annotations

import fcntl
import os
import select
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

T = TypeVar("T")

COMMAND_WITHIN = 60.0
"""Seconds for one command. With the default MessageTimeout, Slurm's clients give up an unavailable
controller after 9 or 18 s, but a busy one may take longer to answer."""

SHORTLY = 20.0
"""Seconds for which to retry when the caller can do without the answer."""

UNCLEAR_WITHIN = 60.0
"""Seconds for which to retry a command that fails with an unknown message."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the second try, doubled for each further one, and the most."""

_OF_SLURM = (
    "SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SCONTROL_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_",
)  # fmt: skip
_CONNECTION = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Variables with which a command finds the controller and authenticates."""

_STEP = frozenset({"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_WORKING_CLUSTER"})
"""Variables with which srun finds its job."""

_AMOUNTS = frozenset(
    f"SLURM_{name}"
    for name in (
        "GPUS", "GPUS_PER_TASK", "TRES_PER_TASK", "NTASKS", "NPROCS", "NTASKS_PER_NODE",
        "NTASKS_PER_GPU", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES", "NNODES",
        "JOB_NUM_NODES", "IMMEDIATE", "KILL_BAD_EXIT", "WAIT", "EXPORT_ENV", "OVERCOMMIT",
    )
)  # fmt: skip
"""Variables of the job from which srun takes a step's size, although ours may have another."""

_PASSING = (
    "Unable to contact slurm controller",
    "Unable to confirm allocation",
    "Unexpected message received",  # `scontrol requeue` while the controller is away
    "Socket timed out",
    "timed out",
    "Zero Bytes were transmitted or received",
    "Connection refused",
    "Connection reset",
    "No route to host",
    "Network is unreachable",
    "Message send failure",
    "Message receive failure",
    "Protocol authentication error",  # munge is away
    "Slurm backup controller in standby mode",
    "Slurm temporarily unable to accept job",
    "Resource temporarily unavailable",
    "Cannot allocate memory",
    "Problem talking to the database",
    "try again in a bit",  # an update of a job that the database does not know yet
)
_REFUSALS = (
    "Invalid job id",
    "Access/permission denied",
    "Requested operation is presently disabled",
    "Only batch jobs are accepted",
    "Job is pending execution",
    "Job/step already completing or completed",
    "Invalid node name",
    "Invalid partition name",
    "Invalid user id",
    "Invalid account",
    "Node count specification invalid",
    "Invalid generic resource",
    "More processors requested than permitted",
    "Requested node configuration is not available",
    "Slurm accounting storage is disabled",
)


_worked: set[str] = set()
"""The commands that this process has started successfully."""

Execute = Callable[[Sequence[str], Mapping[str, str] | None, str | None], "CommandAnswer"]
"""Runs a command, in an environment and a folder."""


class SlurmError(Exception):
    """A command of Slurm was refused or had no answer; the message is one sentence."""


class SlurmSilentError(SlurmError):
    """There was no complete answer; retry."""


class SlurmMissingError(SlurmError):
    """The command does not exist or is not executable. Only if this process has never run it; else
    it counts as silence, since a file system may be unavailable for a moment."""


class SlurmUnclearError(SlurmError):
    """The command failed with an unknown message, so it is unclear whether the cause will pass."""


class SlurmRefusedError(SlurmError):
    """The controller refused; `answer` is its message. Retrying does not help."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(f"`{command}` was refused: {answer}")
        self.answer = answer


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of Slurm's commands, without variables that change their question or output.
    Times are in UTC, so that differences are right across a change of daylight saving."""
    fixed = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
    return _without_slurm(environ, keep=_CONNECTION) | fixed


def probe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of a step whose options are all on the command line; it only names the
    job."""
    return _without_slurm(environ, keep=_CONNECTION | _STEP)


def step_environment(environ: Mapping[str, str], in_step: bool) -> dict[str, str]:
    """The environment of the ranks' step: all but the step's size, which is on the command line.
    The job's binding of tasks, for example, stays. `in_step`: this process is in a step, which
    `environ` describes instead of the job."""
    if in_step:
        return probe_environment(environ)
    kinds = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
    bound = tuple(kind for kind in kinds if _of_a_task(environ, kind))
    left_out = {name for name in environ if name in _AMOUNTS or name.startswith(bound)}
    return _bind_no_amounts({n: value for n, value in environ.items() if n not in left_out})


def _of_a_task(environ: Mapping[str, str], bound: str) -> bool:
    """Whether a binding was inherited from a task in whose shell the job was submitted. srun sets
    several variables in a task, which agree; a user sets only the first, and sbatch sets that of
    memory only if requested."""
    names = (f"{bound}_VERBOSE", f"{bound}_TYPE", f"{bound}_LIST")
    verbose, kind, places = (environ.get(name, "") for name in names)
    prefer = ",prefer" if environ.get(f"{bound}_PREFER") else ""
    value = f"{kind}{places}"
    return bool(kind) and environ.get(bound) in (f"{verbose}{prefer},{value}", value)


def _bind_no_amounts(environ: dict[str, str]) -> dict[str, str]:
    """The environment without the binding that Slurm 24.11 derives from --gpus-per-task: one GPU
    per task."""
    binds = environ.pop("SLURM_TRES_BIND", "").split("+")
    kept = [bind for bind in binds if bind and ":per_task:" not in bind]
    return environ | ({"SLURM_TRES_BIND": "+".join(kept)} if kept else {})


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment of sbatch, which it passes on to the new job: without variables of this job,
    but with `SBATCH_` variables, in which users set their account."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("SLURM_") or name in _CONNECTION
    }


@dataclass(frozen=True)
class CommandAnswer:
    """A command's output and exit code; `status` is None after a timeout."""

    status: int | None
    out: str
    err: str = ""

    @property
    def complaint(self) -> str:
        return (self.err.strip() or self.out.strip()).replace("\n", "; ")


class AnswerKind(Enum):
    """The meaning of an answer that is not what was asked for."""

    SILENCE = "no answer yet"
    REFUSAL = "no"
    UNCLEAR = "words that are not known here"


def judge(answer: CommandAnswer) -> AnswerKind:
    """Classify an answer that is incomplete or an error."""
    if any(words in answer.complaint for words in _REFUSALS):
        return AnswerKind.REFUSAL
    passing = any(words in answer.complaint for words in _PASSING)
    if passing or not answer.err.strip() or answer.status is None or answer.status <= 0:
        return AnswerKind.SILENCE
    return AnswerKind.UNCLEAR


def ask(
    command: Sequence[str],
    read: Callable[[str], T | None],
    environ: Mapping[str, str] | None = None,
) -> T:
    """Run a command once; its output as parsed by `read`, which returns None if it is incomplete.
    The exit code does not count. Raises `SlurmError`."""
    answer = _run(command, environ, None)
    found = read(answer.out)
    if found is not None:
        return found
    raise _failure(command, answer)


def tell(
    command: Sequence[str], cwd: str | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Run a command once whose success is the exit code 0. Raises `SlurmError`."""
    answer = _run(command, environ, cwd)
    if answer.status != 0:
        raise _failure(command, answer)


def _failure(command: Sequence[str], answer: CommandAnswer) -> SlurmError:
    shown = " ".join(command)
    match judge(answer):
        case AnswerKind.REFUSAL:
            return SlurmRefusedError(shown, answer.complaint)
        case AnswerKind.UNCLEAR:
            return SlurmUnclearError(f"`{shown}` failed: {answer.complaint}")
    if answer.status is None:
        return SlurmSilentError(f"`{shown}` had no answer within {COMMAND_WITHIN:g} s")
    reason = answer.complaint if answer.err.strip() else "what it printed is empty or cut off"
    return SlurmSilentError(f"`{shown}` had no answer: {reason}")


def next_pause(failures: int) -> float:
    """Seconds before the next try after `failures` (at least one) in a row."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))


def patiently(
    ask: Callable[[], T],
    within: float,
    on_failure: Callable[[SlurmError], None] = lambda error: None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """Call `ask` until it returns, for `within` seconds, at least once. `on_failure` is called for
    each failed try that is followed by another. Raises `SlurmError`: at once if it was refused or
    there is no such command, after `UNCLEAR_WITHIN` seconds if it is unclear."""
    began, unclear_since, failures = clock(), None, 0
    while True:
        try:
            return ask()
        except (SlurmRefusedError, SlurmMissingError):
            raise
        except SlurmError as error:
            now, failures = clock(), failures + 1
            unclear = isinstance(error, SlurmUnclearError)
            unclear_since = (now if unclear_since is None else unclear_since) if unclear else None
            wait = next_pause(failures)
            too_late = now + wait > began + within
            if too_late or (unclear_since is not None and now - unclear_since > UNCLEAR_WITHIN):
                raise
            on_failure(error)
        pause(wait)


def _without_slurm(environ: Mapping[str, str], keep: frozenset[str]) -> dict[str, str]:
    return {
        name: value
        for name, value in environ.items()
        if name in keep or not name.startswith(_OF_SLURM)
    }


def _execute(
    command: Sequence[str], environ: Mapping[str, str] | None, cwd: str | None
) -> CommandAnswer:
    """Run a command in a session of its own, so that a Ctrl-C at the terminal does not reach it."""
    try:
        process = subprocess.Popen(
            command,
            env=client_environment(os.environ) if environ is None else environ,
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
    except OSError as error:
        raise _cannot_start(command[0], error) from error
    _worked.add(command[0])
    try:
        out, err = process.communicate(timeout=COMMAND_WITHIN)
    except subprocess.TimeoutExpired:
        _kill(process)
        return CommandAnswer(None, "")
    return CommandAnswer(process.returncode, out, err)


_run: Execute = _execute


def execute_by(execute: Execute) -> None:
    global _run
    _run = execute


def _cannot_start(name: str, error: OSError) -> SlurmError:
    if name not in _worked and isinstance(error, (FileNotFoundError, NotADirectoryError)):
        return SlurmMissingError(f"`{name}` is not on the PATH of this host")
    if name not in _worked and isinstance(error, PermissionError):
        return SlurmMissingError(f"`{name}` may not be executed on this host")
    return SlurmSilentError(f"`{name}` cannot be started: {error.strerror}")


def start_step(
    command: Sequence[str],
    environ: Mapping[str, str],
    stdio: tuple[socket.socket, socket.socket] | None = None,
) -> subprocess.Popen[bytes]:
    """Start an srun in a session of its own, with this process's standard output; its errors go
    through a pipe to `see_step_end`. `stdio` is a socket pair whose second end becomes its standard
    input and output. srun also holds the first ends: else, when it outlives this process, it would
    get SIGPIPE and end its tasks while they save. The pipe has room for all that it prints then.
    Raises `SlurmError`."""
    try:
        errors, end = os.pipe()
    except OSError as error:
        raise _cannot_start(command[0], error) from error
    try:
        started = subprocess.Popen(
            command,
            env=environ,
            start_new_session=True,
            stdin=subprocess.DEVNULL if stdio is None else stdio[1].fileno(),
            stdout=None if stdio is None else stdio[1].fileno(),
            stderr=end,
            pass_fds=(errors, *([] if stdio is None else [stdio[0].fileno()])),
        )
    except OSError as error:
        os.close(errors)
        raise _cannot_start(command[0], error) from error
    finally:
        os.close(end)
    _worked.add(command[0])
    with suppress(OSError):  # beyond the user's limit of pipe memory
        fcntl.fcntl(errors, fcntl.F_SETPIPE_SZ, _ROOM)
    started.stderr = os.fdopen(errors, "rb", buffering=0)
    return started


def see_step_end(srun: subprocess.Popen[bytes], hear: Callable[[bytes], None]) -> int:
    """Pass the error output of an srun and its tasks to `hear` until srun ends; its exit code.
    Raises `SlurmSilentError` or `SlurmUnclearError` if it could not start the tasks."""
    assert srun.stderr is not None
    head = b""
    ended, pipe, poll = False, srun.stderr.fileno(), select.poll()
    poll.register(pipe, select.POLLIN)
    while not ended:
        ended = srun.poll() is not None  # a child of srun's may hold the pipe open for longer
        if poll.poll(500):
            chunk = os.read(pipe, 65536)
            ended = not chunk
            head += chunk[: _HEAD - len(head)]
            hear(chunk)
    status = srun.wait()
    srun.stderr.close()
    text = head.decode(errors="replace")
    if status and is_unstarted(text):
        error = _failure(["srun"], CommandAnswer(status, "", text))
        # A refusal of a step in a job that Slurm itself has started may pass.
        raise SlurmUnclearError(str(error)) if isinstance(error, SlurmRefusedError) else error
    return status


_ROOM = 1 << 20
"""Bytes of a pipe; the kernel's maximum without privileges."""

_HEAD = 4096
"""Bytes at the start of srun's errors that are searched for a failed start."""

_NOT_STARTED = (
    "srun: error: Unable to create step",
    "srun: error: Unable to create job step",
    "srun: error: Unable to confirm allocation",
    "srun: error: Unable to allocate resources",
)


def is_unstarted(errors: str) -> bool:
    return any(words in errors for words in _NOT_STARTED)


def _kill(process: subprocess.Popen[str]) -> None:
    """Kill a command after its timeout; one that cannot be killed is abandoned."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
