"""Makes calls that may block for ever, such as writes to a terminal or to storage that hangs.

They are made on a thread of their own, one after the other. Who asks for one waits until it was
made, so that what was told is there when the call returns; but never for longer than `PATIENCE`,
and while an earlier call is stuck not at all.

Nothing beyond the standard library is imported here: this is needed before anything else.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from typing import TypeAlias

PATIENCE = 0.5
"""Seconds that a caller waits for a call that does not return; once, until one returns again."""

IDLE = 5.0
"""Seconds after which a thread ends that has nothing to do; the next errand starts another."""


class Errand:
    """Something to do that may block: `run` returns the seconds after which to try it again.

    None where nothing is left to do. It must not raise what can be expected, such as `OSError`.
    """

    def __init__(self, run: Callable[[], float | None]) -> None:
        self.run = run
        self.asked = self.done = 0
        self.due_at = math.inf


Tickets: TypeAlias = list[tuple[Errand, int]]
"""Errands, each with how often it has to be done until it counts."""


class Courier:
    """A thread that runs errands. Methods may be called from any thread; none raises."""

    _stuck: bool

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_anew()
        _couriers.add(self)

    def prompt(self, errand: Errand) -> None:
        """Have `errand` run now, and wait for that as long as this thread has patience."""
        if sys.is_finalizing():  # no other thread runs any more, and one may have held the lock
            errand.run()
            return
        with self._changed:
            ticket = self._ask_for(errand)
            if not self._has_thread():
                errand.run()  # no thread is to be had: rather wait than keep silent
            elif not (self._stuck or threading.current_thread() is self._thread):
                self._stuck = not self._changed.wait_for(lambda: errand.done >= ticket, PATIENCE)

    def settle(self, seconds: float) -> bool:
        """Have whatever is left tried once more; whether that was done within `seconds`.

        Not to be called once the interpreter is torn down.
        """
        return self.wait_for(self.ask_again(), seconds)

    def ask_again(self) -> Tickets:
        """Have whatever is left tried once more, from now on; what to wait for."""
        with self._changed:
            left = [*self._due, *([] if self._running is None else [self._running])]
            return [(errand, self._ask_for(errand)) for errand in left]

    def wait_for(self, tickets: Tickets, seconds: float) -> bool:
        """Wait until that is done; whether it was within `seconds`."""
        with self._changed:
            if not tickets or not self._has_thread():
                return not tickets
            return self._changed.wait_for(
                lambda: all(errand.done >= ticket for errand, ticket in tickets), seconds
            )

    def _start_anew(self) -> None:
        """Begin without a thread and with nothing to do, as a forked child has to."""
        self._changed = threading.Condition()
        self._due: set[Errand] = set()
        self._running: Errand | None = None
        self._stuck = False
        self._thread: threading.Thread | None = None

    def _ask_for(self, errand: Errand) -> int:
        errand.asked += 1
        errand.due_at = min(errand.due_at, time.monotonic())
        self._due.add(errand)
        self._changed.notify_all()
        return errand.asked

    def _has_thread(self) -> bool:
        """Whether a thread is there; it is started if not."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._running = None
            try:
                self._thread.start()
            except RuntimeError:  # out of threads, or the interpreter is about to end
                self._thread = None
        return self._thread is not None

    def _serve(self) -> None:
        while (due := self._next()) is not None:
            errand, asked = due
            again = errand.run()
            with self._changed:
                errand.done, self._running, self._stuck = asked, None, False
                if again is not None:
                    errand.due_at = min(errand.due_at, time.monotonic() + again)
                    self._due.add(errand)
                self._changed.notify_all()

    def _next(self) -> tuple[Errand, int] | None:
        """The errand that has been due for longest, once there is one, and how often it was asked
        for until now; None where there is nothing to do for a while.
        """
        with self._changed:
            while True:
                first = min(self._due, key=lambda errand: errand.due_at, default=None)
                wait = IDLE if first is None else first.due_at - time.monotonic()
                if first is not None and wait <= 0:
                    self._due.discard(first)
                    first.due_at, self._running = math.inf, first
                    return first, first.asked
                if not self._changed.wait(wait) and not self._due:
                    self._thread = None
                    return None


_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


def settle_all(seconds: float) -> None:
    """Give every courier of this process the chance to end what it has to do; `seconds` in all."""
    end = time.monotonic() + seconds
    # All at once: what one of them cannot end must not take the time of the others.
    asked = [(courier, courier.ask_again()) for courier in list(_couriers)]
    for courier, tickets in asked:
        courier.wait_for(tickets, max(0.0, end - time.monotonic()))


def _forget_all() -> None:
    for courier in list(_couriers):
        courier._start_anew()


os.register_at_fork(after_in_child=_forget_all)
