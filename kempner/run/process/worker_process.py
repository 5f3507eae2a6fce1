"""Child processes that ignore stop signals and die with their parent.

A stop signal usually reaches every process of a job. A child that dies of it takes its parent's
last step or checkpoint along, so children leave the decision to the parent.
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
"""SIGQUIT, too: a rank answers it with its stacks, and its children must survive that."""

SAFE_MODULE = ("-P", "-m")
"""Starts a module of kempner's by its name. Without `-P` a file in the working directory that is
named as one of Python's own, such as `tokenize.py`, would be imported in its place."""

_UNBLOCKED_BY_TRACKER = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def signals_blocked_in_children() -> Iterator[None]:
    """Processes that are spawned inside inherit a mask that blocks the stop signals: they can
    ignore one only after seconds of imports. Signals for the caller wait."""
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS - _UNBLOCKED_BY_TRACKER)
    try:
        # Starting it unblocks two of the signals in this thread; it must survive the others, too.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def ignore_stop_signals(parent: int, *_: object) -> None:
    """To be called in a new child: ignore the stop signals, and die when the parent does. `parent`
    is the process id of the parent. Its *thread* that started the child counts: the child dies with
    it. Raises OSError if the kernel refuses."""
    for number in BLOCKED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    follow_parent(parent, signal.SIGKILL)


def heed_only_parent(*_: object) -> None:
    """To be called in a new child that its parent may end by SIGTERM, as torch's DataLoader ends
    its workers: that still ends it, at once; stop signals of other processes do not."""
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
"""Seconds to wait at most: entering Python takes far less; what runs for longer computes."""


def await_native_threads() -> None:
    """Wait until no thread of torch's own may be entering Python. It holds the lock of the list of
    thread states then, without the GIL, and a child that is forked meanwhile waits for that lock
    for ever (https://github.com/python/cpython/issues/112275). Gloo's threads enter Python after
    each collective, to let go of its tensors."""
    end = time.monotonic() + _ENTERED_WITHIN
    # What holds the lock runs or is about to: it is not taken while waiting for anything else.
    while {"R", "D"} & set(thread_states("self", name="pt_")) and time.monotonic() < end:
        time.sleep(0.0005)


class _Ward(threading.local):
    """What happens around the forks of a process that heeds stop signals for its children, too."""

    active = False
    """Whether it does; of the whole process."""

    def before(self) -> None:
        """A signal that comes between the fork and the child's first lines waits."""
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
    """Whether stop signals are this process's business alone, and not that of what it forks from
    now on, such as the workers of a DataLoader, which a signal to a whole Slurm step would end."""
    _Ward.active = heed


@contextmanager
def killed_on_error() -> Iterator[None]:
    """If the block raises, what multiprocessing started inside it is killed: Python would wait at
    its exit, for ever, for children that ignore SIGTERM."""
    known = set(active_children())
    try:
        yield
    except BaseException:
        kill(set(active_children()) - known)
        raise


def kill(children: Collection[BaseProcess], patience: float = 2.0) -> None:
    """SIGKILL children and reap them, for at most `patience` seconds: one that is stuck in the
    kernel dies later."""
    for child in children:
        child.kill()
    deadline = time.monotonic() + patience
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            # multiprocessing waits without limit, at exit, for every child that it still knows.
            process._children.discard(child)  # type: ignore[attr-defined]
