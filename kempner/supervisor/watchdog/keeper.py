"""Splits the batch process of a job in three: a keeper, the supervisor and its watchdog.

The job's end is bound to one process, the batch process: when it ends, Slurm ends the job, and
kills what else runs in the batch step at once (tried on Slurm 22.05). So that one does nothing: it
keeps the job, passes on what Slurm signals, and leaves as its supervisor does. The supervisor and
the watchdog are its children, and neither one's death ends the job.

Nothing but the standard library is imported: the process is split before anything else."""

from __future__ import annotations

import ctypes
import errno
import math
import os
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import NoReturn

from kempner.supervisor.watchdog.board import JobBoard, SupervisorStage, WatchdogVerdict, share

PASSED_ON = {
    signal.SIGTERM: signal.SIGTERM,
    signal.SIGINT: signal.SIGTERM,  # with `scancel --full` the supervisor gets one itself: not two
    signal.SIGHUP: signal.SIGHUP,
    signal.SIGUSR1: signal.SIGUSR1,
    signal.SIGUSR2: signal.SIGUSR2,
    signal.SIGQUIT: signal.SIGQUIT,
}
"""What Slurm sends to the batch process, and as what the supervisor gets it."""

_AWAITED = {*PASSED_ON, signal.SIGCHLD}

TRIES, PAUSE = 60, 1.0
"""How often a process is tried to be made, and the seconds between: there may be no room now."""

WAKES_EVERY, LONGEST_PAUSE = 2.0, 300.0
"""Seconds between two looks at the watchdog, and the longest before one that died is replaced; each
pause doubles the last."""

TELL_WITHIN = 5.0
"""Seconds that telling of a requeue may take, which storage may hold up."""

REQUEUED = 75
"""The exit code of a job that is in the queue again, as a supervisor's."""

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15  # linux/prctl.h


def split_batch(environ: Mapping[str, str]) -> None:
    """In the batch process of a job this returns in a child, which becomes the supervisor; the
    process itself keeps the job until its end. Elsewhere it does nothing."""
    if not is_batch_process(environ):
        return
    board = JobBoard()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _AWAITED)
    supervisor = _fork()
    if supervisor == 0:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        share(board)
        return
    _keep(board, supervisor, environ)


def is_batch_process(environ: Mapping[str, str]) -> bool:
    """Whether this is the process that Slurm has started for a job's script, or runs in its shell.

    A guess that costs nothing; the watchdog then finds out for certain. A process at a terminal is
    none: what is pressed there is for the supervisor alone."""
    script = environ.get("SLURM_TASK_PID", "")
    if not environ.get("SLURM_JOB_ID") or script not in (str(os.getpid()), str(os.getppid())):
        return False
    return not any(os.isatty(stream) for stream in (0, 1, 2))


def _fork() -> int:
    for left in reversed(range(TRIES)):
        try:
            return os.fork()
        except OSError:
            if not left:
                raise
            time.sleep(PAUSE)
    raise AssertionError


def _keep(board: JobBoard, supervisor: int, environ: Mapping[str, str]) -> NoReturn:
    name_process("kempner-keeper")
    for number in _AWAITED:
        signal.signal(number, signal.SIG_DFL)  # blocked; one that is ignored would not be seen
    watchdog = _WatchdogProcess(board, environ)
    while board.status is None:
        received = signal.sigtimedwait(_AWAITED, WAKES_EVERY)
        if received is not None and received.si_signo in PASSED_ON:
            _signal(supervisor, PASSED_ON[signal.Signals(received.si_signo)])
        watchdog.look_after()
        if (status := _ended(supervisor)) is not None:
            board.tell_status(status)
    while board.stage is not SupervisorStage.SETTLED and watchdog.look_after():
        signal.sigtimedwait(_AWAITED, WAKES_EVERY)
    watchdog.end()
    _leave(board, watchdog.teller)


class _WatchdogProcess:
    """The watchdog's process: woken where it was stopped, replaced where it died.

    `teller` is the process that tells of what it did."""

    def __init__(self, board: JobBoard, environ: Mapping[str, str]) -> None:
        self._board, self._environ = board, environ
        self._starts, self._due = 0, 0.0
        self._process: int | None = None
        self.teller: int | None = None
        self.look_after()

    def look_after(self) -> bool:
        """Do what is due; whether the watchdog still has something to do."""
        if self._process is not None:
            if (status := _ended(self._process)) is None:
                _signal(self._process, signal.SIGCONT)
                return True
            self._process = None
            if status == 0:
                self._due = math.inf
                self.teller = (
                    None if self._board.verdict is WatchdogVerdict.NONE else _tell(self._board)
                )
        if time.monotonic() >= self._due:
            self._starts += 1
            self._due = time.monotonic() + min(WAKES_EVERY * 2.0**self._starts, LONGEST_PAUSE)
            self._process = _start_watchdog(self._board, self._environ)
        return self._due < math.inf

    def end(self) -> None:
        if self._process is not None:
            _signal(self._process, signal.SIGKILL)


def _start_watchdog(board: JobBoard, environ: Mapping[str, str]) -> int | None:
    """Its process; None where there is no room for one now."""
    keeper = os.getpid()
    try:
        watchdog = os.fork()
    except OSError:
        return None
    if watchdog:
        return watchdog
    code = 1
    try:
        name_process("kempner-watch")
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() == keeper:
            _leave_storage()
            # Now, since nothing is to be loaded later.
            from kempner.supervisor.watchdog.watch import watch

            watch(board, environ)
            code = 0
    finally:
        os._exit(code)


def _leave_storage() -> None:
    """Hold no descriptor on storage: to close it, as every exec does, may take for ever."""
    nothing = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    os.chdir("/")
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    os.close(nothing)


def _leave(board: JobBoard, teller: int | None) -> NoReturn:
    """End as the supervisor did, or as one that has put the job back into the queue."""
    until = time.monotonic() + TELL_WITHIN
    while teller is not None and _ended(teller) is None and time.monotonic() < until:
        time.sleep(0.05)
    if board.verdict is not WatchdogVerdict.REQUEUED:
        _end_with(board.status or 0)
    os._exit(REQUEUED)


def _end_with(status: int) -> NoReturn:
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, (number,))
        os.kill(os.getpid(), number)
        os._exit(128 + number)
    os._exit(os.waitstatus_to_exitcode(status))


def _tell(board: JobBoard) -> int | None:
    """Have a child tell of what the watchdog did: storage may hold it up, and nothing else."""
    try:
        teller = os.fork()
    except OSError:
        return None
    if teller:
        return teller
    try:
        import json  # only now: storage may hold up this child alone

        _write(2, f"kempner: {board.reason}\n")
        if board.verdict is WatchdogVerdict.REQUEUED and board.ledger:
            ledger = os.open(board.ledger, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
            _write(ledger, f"\n{json.dumps(requeued(board, os.environ, time.time()))}\n")
            os.fsync(ledger)
    finally:
        os._exit(0)


def _write(descriptor: int, text: str) -> None:
    os.write(descriptor, text.encode("utf-8", "replace"))


def requeued(board: JobBoard, environ: Mapping[str, str], now: float) -> dict[str, object]:
    """The ledger's line `requeued`, as `kempner.run.record.events` has it, without its imports."""
    return {
        "schema": 1,
        "time": round(now, 3),
        "event": "requeued",
        "attempt": board.attempt,
        "step": board.step,
        "job": _job(environ),
        "restarts": int(environ.get("SLURM_RESTART_COUNT") or "0"),
        "nodes": environ.get("SLURM_JOB_NODELIST"),
        "reason": board.reason,
        "preempted": False,
        "by_rank": None,
        "without": [],
        "starting": board.stage is SupervisorStage.STARTING,
    }


def _job(environ: Mapping[str, str]) -> str:
    array, task = environ.get("SLURM_ARRAY_JOB_ID"), environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else environ["SLURM_JOB_ID"]


def _ended(child: int) -> int | None:
    """The status of a child that has ended."""
    try:
        gone, status = os.waitpid(child, os.WNOHANG)
    except ChildProcessError:
        return 0
    return status if gone else None


def _signal(process: int, number: int) -> None:
    try:
        os.kill(process, number)
    except OSError as error:
        if error.errno != errno.ESRCH:
            raise


def name_process(name: str) -> None:
    """As `ps -e` and /proc/PID/comm show it: 15 bytes."""
    _prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()))


def _prctl(option: int, value: object) -> None:
    with suppress(OSError):
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
