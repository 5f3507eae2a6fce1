"""Threads that restart after an error, that wait for slow work, or that retry when the machine has
no room for them; and clocks: one that stops while this process is suspended, one that is
monotonic."""

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
"""Seconds; longer than any loop of kempner waits between two looks, and shorter than any
deadline."""


class AwakeClock:
    """A clock that does not count the time for which this process was suspended, as by Slurm for
    hours (PreemptMode=SUSPEND). At most `LONGEST_NAP` seconds count between two looks."""

    def __init__(self) -> None:
        self._looked_at, self._now = time.monotonic(), 0.0
        self._woke_at: float | None = None
        self.woke_at = -inf
        """When the last suspension ended, by this clock; minus infinity before any."""

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
    """Seconds since the epoch, unaffected by later changes of the system clock, as by NTP: the time
    of day when this process began plus the time since. Patience is measured by it."""
    return _BOOTED + time.clock_gettime(time.CLOCK_BOOTTIME)


PAUSE = 1.0
"""Seconds before a failed thread restarts, or starting one is tried again."""

TRIES = 60
"""Attempts to start a thread: the machine may have no room for one at the moment."""


def helper_thread(
    work: Callable[[], None], name: str, pause: Callable[[float], object] = time.sleep
) -> threading.Thread:
    """A daemon thread, not started yet, that runs `work`, and again whenever it raises."""

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
    """Run `work` in a daemon thread, and again whenever it raises. Raises as `started`."""
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
    """Start a thread once there is room for it. Raises `RuntimeError` if there is none for a
    minute."""
    once_there_is_room(thread.start, pause)
    return thread


T = TypeVar("T")

_NO_ROOM = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE)


def once_there_is_room(make: Callable[[], T], pause: Callable[[float], object] = time.sleep) -> T:
    """Call `make` until this machine has the thread, process, memory or descriptor that it needs,
    and return its result. Raises the last such error after a minute, and any other at once."""
    for left in reversed(range(TRIES)):
        try:
            return make()
        except (RuntimeError, MemoryError, OSError) as error:
            if not left or (isinstance(error, OSError) and error.errno not in _NO_ROOM):
                raise
            pause(PAUSE)
    raise AssertionError


LOOK = 0.2
"""Seconds between two calls of `stop`."""


def unless(stop: Callable[[], bool], work: Callable[[], T], name: str) -> T | None:
    """Run `work` in a thread called `name`, and return or raise what it does; return None as soon
    as `stop()` is true. The thread then goes on unobserved."""
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def do() -> None:
        try:
            results.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again in the waiting thread
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
    """Call `react` from a thread once a process of this machine has ended; at once if it is
    gone."""
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
