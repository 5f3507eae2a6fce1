"""Child processes that ignore stop signals and die with their parent.

A stop signal usually reaches every process of a job. A child that dies of it costs its parent the
last step or checkpoint, so children leave the decision to the parent.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import active_children, process, resource_tracker
from multiprocessing.process import BaseProcess

from kempner.run.process.signals import STOP_SIGNALS, follow_parent
from kempner.run.process.whereabouts import thread_states

BLOCKED_SIGNALS = frozenset({*STOP_SIGNALS, signal.SIGQUIT})
"""SIGQUIT, too: a rank dumps its stacks on it, and its children must survive that."""

SAFE_MODULE = ("-P", "-m")
"""Options to start a module of kempner. Without `-P` a file in the working directory, such as
`tokenize.py`, could shadow a module of the standard library."""

_UNBLOCKED_BY_TRACKER = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Spawned processes inherit a mask that blocks the stop signals: they could not ignore them
    before seconds of imports. Signals for the caller stay pending until the end of the block."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS - _UNBLOCKED_BY_TRACKER)
    try:
        # Starting it unblocks two of the signals in this thread; the others stay blocked in it.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def ignore_stop_signals(parent: int, *_: object) -> None:
    """In a new child: ignore the stop signals, and die with the parent (process id `parent`), or
    rather with the *thread* that started the child. Raises `OSError` if the kernel refuses."""
    for number in BLOCKED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    follow_parent(parent, signal.SIGKILL)


def heed_only_parent(*_: object) -> None:
    """In a new child: exit at once on a SIGTERM of the parent, as torch's DataLoader ends its
    workers, and ignore stop signals of other processes."""
    signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
    waiter = threading.Thread(target=_wait_for, args=(os.getppid(),), name="signals", daemon=True)
    waiter.start()


def _wait_for(parent: int) -> None:
    while True:
        received = signal.sigwaitinfo(BLOCKED_SIGNALS)
        if received.si_signo == signal.SIGTERM and received.si_pid == parent:
            os._exit(0)


_FORK_MAY_HANG = sys.version_info < (3, 11, 10)

_ENTERED_WITHIN = 1.0
"""Most seconds to wait: entering Python takes far less; a thread that runs for longer computes."""


def await_native_threads() -> None:
    """Wait until no thread of torch can be entering Python. Such a thread holds the lock of the
    list of thread states without the GIL, and a child forked meanwhile waits for that lock for ever
    (https://github.com/python/cpython/issues/112275). Gloo's threads enter Python after each
    collective, to release its tensors."""
    end = time.monotonic() + _ENTERED_WITHIN
    # The holder of the lock is runnable: it waits for nothing else meanwhile.
    while {"R", "D"} & set(thread_states("self", name="pt_")) and time.monotonic() < end:
        time.sleep(0.0005)


class _Ward(threading.local):
    """Fork hooks of a process that handles stop signals for its children, too."""

    active = False
    """Whether this process does."""

    def before(self) -> None:
        """Keep a signal pending that comes between the fork and the child's first lines."""
        if _Ward.active:
            self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
            if _FORK_MAY_HANG:
                await_native_threads()

    def in_parent(self) -> None:
        if _Ward.active:
            signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)

    def in_child(self) -> None:
        if _Ward.active:
            heed_only_parent()


_ward = _Ward()
os.register_at_fork(
    before=_ward.before, after_in_parent=_ward.in_parent, after_in_child=_ward.in_child
)


def heed_for_children(heed: bool) -> None:
    """Set whether processes forked from now on leave stop signals to this one (`heed`), such as the
    workers of a DataLoader, which a signal to a whole Slurm step would end."""
    _Ward.active = heed


@contextmanager
def killed_on_error() -> Iterator[None]:
    """If the block raises, kill what multiprocessing started in it: Python would wait for ever, at
    exit, for children that ignore SIGTERM."""
    known = set(active_children())
    try:
        yield
    except BaseException:
        kill(set(active_children()) - known)
        raise


def kill(children: Collection[BaseProcess], patience: float = 2.0) -> None:
    """SIGKILL children and reap them, within `patience` seconds: one stuck in the kernel dies
    later."""
    for child in children:
        child.kill()
    deadline = time.monotonic() + patience
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            # At exit, multiprocessing waits without limit for every child that it still knows.
            process._children.discard(child)  # type: ignore[attr-defined]
