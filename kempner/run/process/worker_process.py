"""Child processes that ignore stop signals and die with their parent.

A stop signal usually reaches every process of a job. A child that dies of it takes its parent's
last step or checkpoint along, so children leave the decision to the parent.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from multiprocessing import active_children, process, resource_tracker
from multiprocessing.process import BaseProcess

from kempner.run.process.signals import STOP_SIGNALS, follow_parent

UNHEARD = frozenset({*STOP_SIGNALS, signal.SIGQUIT})
"""SIGQUIT, too: a rank answers it with its stacks, and its children must survive that."""

_UNBLOCKED_BY_TRACKER = frozenset({signal.SIGINT, signal.SIGTERM})


@contextmanager
def born_deaf() -> Iterator[None]:
    """Processes that are spawned inside inherit a mask that blocks the stop signals.

    Their own code can ignore a signal only after seconds of imports. Signals for the caller wait
    until the block ends.
    """
    previous = signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD - _UNBLOCKED_BY_TRACKER)
    try:
        # Starting it unblocks two of the signals in this thread; it must survive the others, too.
        resource_tracker.ensure_running()
        signal.pthread_sigmask(signal.SIG_BLOCK, UNHEARD)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous)


def stay_deaf(parent: int, *_: object) -> None:
    """To be called in a new child: ignore the stop signals, and die when the parent does.

    `parent` is the process id of the parent. Its *thread* that started the child counts: the child
    dies with it. Raises OSError if the kernel refuses.
    """
    for number in UNHEARD:
        signal.signal(number, signal.SIG_IGN)
    follow_parent(parent, signal.SIGKILL)


@contextmanager
def killed_on_error() -> Iterator[None]:
    """If the block raises, every process that multiprocessing started inside it is killed.

    Children that ignore SIGTERM would otherwise be waited for, for ever, when Python exits.
    """
    known = set(active_children())
    try:
        yield
    except BaseException:
        kill(set(active_children()) - known)
        raise


def kill(children: Collection[BaseProcess], patience: float = 2.0) -> None:
    """SIGKILL children and reap them, for at most `patience` seconds.

    One that is stuck in the kernel, on storage that does not answer, dies when that lets it go.
    """
    for child in children:
        child.kill()
    deadline = time.monotonic() + patience
    for child in children:
        child.join(max(0.0, deadline - time.monotonic()))
        if child.is_alive():
            # multiprocessing waits without limit, at exit, for every child that it still knows.
            process._children.discard(child)  # type: ignore[attr-defined]
