"""Threads that must not end unseen, that wait for something slow, or that there is no room for; and
clocks: one that stops while this process is suspended, one that cannot be set.
"""

from __future__ import annotations

import errno
import os
import select
import threading
import time
from collections.abc import Callable
from math import inf
from typing import TypeVar

from kempner.run.output.logs import logger

LONGEST_NAP = 2.5
"""Seconds; more than a loop of ours ever waits between two looks, and less than any deadline."""


class AwakeClock:
    """A clock that does not count the time for which this process was suspended: Slurm may do so
    for hours (PreemptMode=SUSPEND). Between two looks at most `LONGEST_NAP` seconds count."""

    def __init__(self) -> None:
        self._looked_at, self._now = time.monotonic(), 0.0
        self._woke_at: float | None = None
        self.woke_at = -inf
        """When the last suspension was over, by this clock; minus infinity before any."""

    def now(self) -> float:
        at = time.monotonic()
        slept = at - self._looked_at > LONGEST_NAP
        self._now += min(at - self._looked_at, LONGEST_NAP)
        self._looked_at = at
        if slept:
            self._woke_at, self.woke_at = at, self._now
        return self._now

    def stood_still(self, seconds: float) -> bool:
        """Whether this process was suspended within the last `seconds`."""
        self.now()
        return self._woke_at is not None and self._looked_at - self._woke_at < seconds


_BOOTED = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def steady_time() -> float:
    """Seconds since the epoch by the time of day with which this process began. Where the clock is
    set meanwhile, by a person or by NTP, this one goes on evenly: patience is measured by it."""
    return _BOOTED + time.clock_gettime(time.CLOCK_BOOTTIME)


PAUSE = 1.0
"""Seconds before a thread that failed begins again, or that could not be started is started."""

TRIES = 60
"""Times that a thread is tried to be started: the machine may have no room for one just now."""


def helper_thread(
    work: Callable[[], None], name: str, pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """A daemon thread, not started yet, that does `work`, and again where that raises."""

    def run() -> None:
        while True:
            try:
                return work()
            except Exception:  # noqa: BLE001 - whatever it is, the run needs this thread
                logger().error(f"the thread {name!r} failed and begins again", exc_info=True)
            pause(PAUSE)

    return threading.Thread(target=run, name=name, daemon=True)


def keep_running(
    name: str, work: Callable[[], None], pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """Run `work` in a daemon thread; if it raises, from its beginning again. Raises as
    `started`."""
    return started(helper_thread(work, name, pause), pause)


def start_thread(
    name: str, work: Callable[[], None], pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """Run `work` in a daemon thread, once. Raises as `started`."""
    thread = threading.Thread(target=work, name=name, daemon=True)
    once_there_is_room(thread.start, pause)
    return thread


def started(
    thread: threading.Thread, pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """A thread, once there is room for it. Raises `RuntimeError` if there is none for a minute."""
    once_there_is_room(thread.start, pause)
    return thread


T = TypeVar("T")

_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def once_there_is_room(make: Callable[[], T], pause: Callable[[float], object] = time.sleep) -> T:
    """What `make` returns, as soon as this machine has a thread, a process, memory or a descriptor
    for it. Raises the last error if it has none for a minute, and any other at once."""
    for left in reversed(range(TRIES)):
        try:
            return make()
        except (RuntimeError, MemoryError, OSError) as error:
            if not left or (isinstance(error, OSError) and error.errno not in _NO_ROOM):
                raise
            pause(PAUSE)
    raise AssertionError


LOOK = 0.2
"""Seconds between two looks whether to go on waiting."""


def unless(stop: Callable[[], bool], work: Callable[[], T], name: str) -> T | None:
    """What `work` returns or raises, in a thread of this `name`; None once `stop()` is true."""
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            errors.append(error)
        finally:
            done.set()

    start_thread(name, do)
    while not done.wait(LOOK):
        if stop():
            return None
    if errors:
        raise errors[0]
    return results[0]


def call_at_end_of(pid: int, react: Callable[[], object]) -> None:
    """Call `react` once a process of this machine has ended, from a thread; now if it is gone."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        react()
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        while not poll.poll():
            pass
        react()

    start_thread("parent", wait)
