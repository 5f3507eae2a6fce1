"""Runs one command of Slurm, and tells its answer from its silence.

Slurm answers late. A controller that restarts or fails over is away for minutes, a database for
hours, and a busy one drops requests; a fork fails while memory is short. All of that passes, and
asking again helps (`patiently`). A refusal is the only thing that does not pass. What a command
prints counts, not what it exits with: an answer that is empty or cut off is none.

Never to be called from a signal handler.
"""

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
"""Seconds for one command. Slurm's own clients give up sooner: with the default MessageTimeout on a
controller that is away after 9 or 18 s. A busy one may take longer to answer."""

SHORTLY = 20.0
"""Seconds for which a question is repeated where the caller can do without the answer."""

UNCLEAR_WITHIN = 60.0
"""Seconds for which a command is repeated that fails with words that are not known here."""

FIRST_PAUSE, LONGEST_PAUSE = 0.5, 10.0
"""Seconds before the second try, and the most before any other; each pause doubles the last."""

_OF_SLURM = (
    "SLURM_", "SBATCH_", "SALLOC_", "SRUN_", "SCONTROL_", "SQUEUE_", "SACCT_", "SCANCEL_", "SINFO_",
)  # fmt: skip
_CONNECTION = frozenset({"SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT"})
"""Variables by which a command finds and authenticates to the controller."""

_STEP = frozenset({"SLURM_JOB_ID", "SLURM_JOBID", "SLURM_WORKING_CLUSTER"})
"""By which srun finds the job around it."""

_AMOUNTS = frozenset(
    f"SLURM_{name}"
    for name in (
        "GPUS", "GPUS_PER_TASK", "TRES_PER_TASK", "NTASKS", "NPROCS", "NTASKS_PER_NODE",
        "NTASKS_PER_GPU", "NTASKS_PER_CORE", "NTASKS_PER_SOCKET", "NTASKS_PER_TRES", "NNODES",
        "JOB_NUM_NODES", "IMMEDIATE", "KILL_BAD_EXIT", "WAIT", "EXPORT_ENV", "OVERCOMMIT",
    )
)  # fmt: skip
"""What srun takes from the job for every step in it, though this step may be another size."""

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
"""The commands that this process could start."""

Execute = Callable[[Sequence[str], Mapping[str, str] | None, str | None], "CommandAnswer"]
"""Runs a command, in an environment and a folder."""


class SlurmError(Exception):
    """A command of Slurm was refused or had no answer: one sentence."""


class SlurmSilentError(SlurmError):
    """There was no answer, or only a part of one. It passes: ask again."""


class SlurmMissingError(SlurmError):
    """The command is not there, or not executable, and this process never ran it: else that is
    silence, since a file system may be away for a moment."""


class SlurmUnclearError(SlurmError):
    """The command failed with an unknown message, so it is unclear whether the cause will pass."""


class SlurmRefusedError(SlurmError):
    """The controller answered no, `answer` in its own words. To ask again makes no difference."""

    def __init__(self, command: str, answer: str) -> None:
        super().__init__(f"`{command}` was refused: {answer}")
        self.answer = answer


def client_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What Slurm's commands get: nothing that changes what they ask, or how they print it. Times
    are in UTC, so that their differences are right when daylight saving begins or ends."""
    fixed = {"LC_ALL": "C", "SLURM_TIME_FORMAT": "standard", "TZ": "UTC"}
    return _without_slurm(environ, keep=_CONNECTION) | fixed


def probe_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What a step of our own gets that says itself all that it needs: which job it is in."""
    return _without_slurm(environ, keep=_CONNECTION | _STEP)


def step_environment(environ: Mapping[str, str], in_step: bool) -> dict[str, str]:
    """What the ranks' step gets: all but the amounts, which are on its command line. How the job
    wishes its tasks to be bound, for example, stays. `in_step` says that this process is itself in
    a step: what `environ` says is about that one."""
    if in_step:
        return probe_environment(environ)
    kinds = ("SLURM_CPU_BIND", "SLURM_MEM_BIND")
    bound = tuple(kind for kind in kinds if _of_a_task(environ, kind))
    left_out = {name for name in environ if name in _AMOUNTS or name.startswith(bound)}
    return _bind_no_amounts({n: value for n, value in environ.items() if n not in left_out})


def _of_a_task(environ: Mapping[str, str], bound: str) -> bool:
    """Whether a binding is that of a task in whose shell the job was submitted. srun tells its
    tasks of theirs in several variables that agree. A user who wishes the ranks to be bound sets
    the first alone, and sbatch says of memory only what is asked for."""
    names = (f"{bound}_VERBOSE", f"{bound}_TYPE", f"{bound}_LIST")
    verbose, kind, places = (environ.get(name, "") for name in names)
    prefer = ",prefer" if environ.get(f"{bound}_PREFER") else ""
    said = f"{kind}{places}"
    return bool(kind) and environ.get(bound) in (f"{verbose}{prefer},{said}", said)


def _bind_no_amounts(environ: dict[str, str]) -> dict[str, str]:
    """Without what Slurm 24.11 makes of --gpus-per-task by itself: one of the GPUs for each
    task."""
    binds = environ.pop("SLURM_TRES_BIND", "").split("+")
    kept = [bind for bind in binds if bind and ":per_task:" not in bind]
    return environ | ({"SLURM_TRES_BIND": "+".join(kept)} if kept else {})


def submission_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """What sbatch gets, and hands on to the new job: nothing that is about this one. The `SBATCH_`
    variables, by which people name their account, stay."""
    return {
        name: value
        for name, value in environ.items()
        if not name.startswith("SLURM_") or name in _CONNECTION
    }


@dataclass(frozen=True)
class CommandAnswer:
    """What a command printed and exited with; `status` is None if it did not end in time."""

    status: int | None
    out: str
    err: str = ""

    @property
    def complaint(self) -> str:
        return (self.err.strip() or self.out.strip()).replace("\n", "; ")


class AnswerKind(Enum):
    """What an answer is worth that is not what was asked for."""

    SILENCE = "no answer yet"
    REFUSAL = "no"
    UNCLEAR = "words that are not known here"


def judge(answer: CommandAnswer) -> AnswerKind:
    """What an answer is worth in which something is missing, or that ended with an error."""
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
    """What `read` finds in the output of a command; it returns None if not all of it is there. The
    exit code does not count. Asked once. Raises `SlurmError`."""
    answer = _run(command, environ, None)
    found = read(answer.out)
    if found is not None:
        return found
    raise _failure(command, answer)


def tell(
    command: Sequence[str], cwd: str | None = None, environ: Mapping[str, str] | None = None
) -> None:
    """Run a command that is answered by an exit code of 0, once. Raises `SlurmError`."""
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
    said = answer.complaint if answer.err.strip() else "what it printed is empty or cut off"
    return SlurmSilentError(f"`{shown}` had no answer: {said}")


def next_pause(failures: int) -> float:
    """Seconds before the next try, after a number of `failures` in a row (at least one)."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 10))


def patiently(
    ask: Callable[[], T],
    within: float,
    on_failure: Callable[[SlurmError], None] = lambda error: None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], object] = time.sleep,
) -> T:
    """The answer, asked for again and again for `within` seconds, at least once. `on_failure` is
    called for each failed try that is followed by another. Raises `SlurmError`: at once if it is
    refused or cannot be asked here, after `UNCLEAR_WITHIN` seconds if it is unclear."""
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
    """In a session of its own: a Ctrl-C at the terminal is for us, not for what we ask."""
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
    """Start an srun, in a session of its own, with our output; its errors come through a pipe, for
    `see_step_end`. `stdio` are both ends of what is to be its standard input and output, of which
    it gets the second. Raises `SlurmError`. srun holds the other ends, too: one that outlives this
    process would be sent SIGPIPE, and end its tasks while they save. There is room for all that it
    then says."""
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
    with suppress(OSError):  # beyond the user's share of such memory
        fcntl.fcntl(errors, fcntl.F_SETPIPE_SZ, _ROOM)
    started.stderr = os.fdopen(errors, "rb", buffering=0)
    return started


def see_step_end(srun: subprocess.Popen[bytes], hear: Callable[[bytes], None]) -> int:
    """Have `hear` told what an srun and its tasks complain about until it ends; its exit code.
    Raises `SlurmSilentError` or `SlurmUnclearError` if it could not start the tasks."""
    assert srun.stderr is not None
    head = b""
    ended, pipe, poll = False, srun.stderr.fileno(), select.poll()
    poll.register(pipe, select.POLLIN)
    while not ended:
        ended = srun.poll() is not None  # a helper of srun's may hold the pipe for longer
        if poll.poll(500):
            chunk = os.read(pipe, 65536)
            ended = not chunk
            head += chunk[: _HEAD - len(head)]
            hear(chunk)
    status = srun.wait()
    srun.stderr.close()
    said = head.decode(errors="replace")
    if status and is_unstarted(said):
        error = _failure(["srun"], CommandAnswer(status, "", said))
        # What Slurm refuses for a step of a job that it has started is its own fault, and passes.
        raise SlurmUnclearError(str(error)) if isinstance(error, SlurmRefusedError) else error
    return status


_ROOM = 1 << 20
"""Bytes of a pipe, as much as the kernel grants without a privilege."""

_HEAD = 4096
"""Bytes among which an srun says that it cannot start its tasks."""

_NOT_STARTED = (
    "srun: error: Unable to create step",
    "srun: error: Unable to create job step",
    "srun: error: Unable to confirm allocation",
    "srun: error: Unable to allocate resources",
)


def is_unstarted(said: str) -> bool:
    return any(words in said for words in _NOT_STARTED)


def _kill(process: subprocess.Popen[str]) -> None:
    """End a command that outstays its time; one that cannot be killed is left behind."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        process.wait(1.0)
