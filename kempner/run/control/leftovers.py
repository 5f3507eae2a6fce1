"""Ends the processes that an earlier attempt has left on this machine.

When a supervisor is killed, the kernel kills its ranks, but not what a rank that is only a wrapper
has started. Two programs would then train the same run.

Also finds the processes to which a SIGTERM for a program must go, past such wrappers.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep

import psutil

from kempner.run.control.launch_env import mark_of, run_of
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.run_dir import RunDirectory


def processes_to_signal(
    process: psutil.Process, informed: Collection[int] = ()
) -> list[tuple[psutil.Process, bool]]:
    """The process and those of its descendants to send SIGTERM, each with whether it handles a stop
    for its children: it traps the signal, or its id is in `informed` (it is asked in another way).
    Below such a process none is signalled."""
    with suppress(psutil.Error):
        if process.pid in informed or _traps(process.pid, signal.SIGTERM):
            return [(process, True)]
        children = process.children()
        below = (found for child in children for found in processes_to_signal(child, informed))
        return [(process, False), *below]
    return []


def _traps(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has just gone
    masks = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(next(masks, "0"), 16) >> (number - 1) & 1)


_KILL_TIME = 2.0
"""Seconds in which a killed process is gone, unless it is stuck in the kernel."""

_LOOK = 0.2
"""Seconds between two looks whether they are gone."""


def end_leftovers(run: RunDirectory, grace: float, hurry: Callable[[], bool] = bool) -> None:
    """End what earlier supervisors of this run have started here; this process now owns the run.
    SIGTERM goes first; then they have `grace` seconds to save, less once `hurry` returns True.
    Raises `UsageError` if some cannot be ended."""
    left = leftovers(run)
    if not left:
        return
    pids = ", ".join(str(process.pid) for process in left)
    logger().warning(
        f"ending what an earlier supervisor of this run has left behind: process {pids}"
    )
    heads = [process for process in left if _parent(process) not in {p.pid for p in left}]
    for process, _ in (asked for head in heads for asked in processes_to_signal(head)):
        with suppress(psutil.Error):
            process.terminate()
    _wait_until_gone(left, grace, hurry)
    left = leftovers(run)
    for process in left:
        with suppress(psutil.Error):
            process.kill()
    if stuck := _wait_until_gone(left, _KILL_TIME):
        pids = ", ".join(str(process.pid) for process in stuck)
        raise UsageError(
            f"process {pids} on this machine is of the run in {run.path} and cannot be ended; "
            "start again when it is gone"
        )


def _wait_until_gone(
    processes: Sequence[psutil.Process], seconds: float, hurry: Callable[[], bool] = bool
) -> list[psutil.Process]:
    """Those still alive after that time; a zombie is not."""
    end, left = monotonic() + seconds, list(processes)
    while (left := list(filter(_lives, left))) and monotonic() < end and not hurry():
        sleep(_LOOK)
    return left


def _lives(process: psutil.Process) -> bool:
    try:
        return process.is_running() and bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def leftovers(run: RunDirectory) -> Sequence[psutil.Process]:
    """The processes on this machine whose environment names this run, but not this process's own
    supervisor; without the ancestors of this process and of its siblings."""
    ours, mine, found = mark_of(os.environ), [psutil.Process()], []
    where = os.path.realpath(run.path)
    for process in psutil.process_iter():
        with suppress(psutil.Error, OSError):
            environ = process.environ()
            mark, named_run = mark_of(environ), run_of(environ)
            if mark is not None and mark == ours:
                mine.append(process)
            elif (mark is not None and str(mark.run) == where) or (
                mark is None and named_run is not None and os.path.realpath(named_run) == where
            ):
                found.append(process)
    kept = {process.pid for process in mine} | {pid for one in mine for pid in _above(one)}
    return [process for process in found if process.pid not in kept]


def _above(process: psutil.Process) -> list[int]:
    try:
        return [parent.pid for parent in process.parents()]
    except psutil.Error:  # it has just gone
        return []


def _parent(process: psutil.Process) -> int:
    try:
        return process.ppid()
    except psutil.Error:  # it has just gone
        return 0
