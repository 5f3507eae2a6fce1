"""`ShutdownHandler`: a request to stop, noticed at any time, acted on where it is safe.

Imports no torch, because it is installed before torch is imported.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum

from kempner.run.process.signals import Received, exit_immediately, inbox


class StopReason(IntEnum):
    """Why the ranks stop. The greatest reason of any rank is the one that all follow."""

    NONE = 0
    SIGNAL = 1
    """SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 came."""


@dataclass(frozen=True)
class _Request:
    """A request to stop, when it came and what it must be done by (`time.monotonic` seconds)."""

    reason: StopReason
    at: float
    deadline: float | None


class ShutdownHandler:
    """Traps the stop signals and remembers them; installing it twice, or a second signal, is fine.

    Until `join_group` is called, nothing that this process does concerns anybody else: a stop
    signal then ends it at once, with exit code 75, even while it waits for peers in native code.
    Afterwards a signal is only a request, for the ranks to vote on.
    """

    def __init__(self) -> None:
        self._signals = inbox()
        self._requests: tuple[_Request, ...] = ()
        self._grace: float | None = None
        self._on_signal: Callable[[], None] = lambda: None

    def install(self) -> None:
        """Trap the signals and leave on any of them until `join_group`."""
        self._signals.install()
        self._signals.react_with(exit_immediately)

    def join_group(
        self, grace: float | None = None, on_signal: Callable[[], None] = lambda: None
    ) -> None:
        """From now on peers depend on this process: signals become requests.

        `grace` is how many seconds after a signal the process will be killed; None if nobody will.
        `on_signal` is called, from a thread, if it is a signal that first asks for a stop.
        """
        self._grace, self._on_signal = grace, on_signal
        self._signals.react_with(self._note)

    def stop(self, reason: StopReason, seconds_left: float | None = None) -> None:
        """Ask for a stop, from any thread; of several deadlines the nearest counts."""
        now = time.monotonic()
        deadline = None if seconds_left is None else now + seconds_left
        self._requests = (*self._requests, _Request(reason, now, deadline))

    def should_shutdown(self) -> bool:
        """Whether a stop was asked for."""
        return bool(self._requests)

    def reason(self) -> StopReason:
        """Why this rank wants to stop, for its vote."""
        return max((request.reason for request in self._requests), default=StopReason.NONE)

    def seconds_left(self) -> float | None:
        """Until the nearest deadline, negative once it is over; None without one."""
        deadlines = [r.deadline for r in self._requests if r.deadline is not None]
        return min(deadlines) - time.monotonic() if deadlines else None

    def seconds_since_asked(self) -> float:
        """Since this process was first asked to stop; 0 if it was not."""
        return time.monotonic() - self._requests[0].at if self._requests else 0.0

    def _note(self, received: Received) -> None:
        waited, first = time.monotonic() - received.at, not self._requests
        self.stop(StopReason.SIGNAL, None if self._grace is None else self._grace - waited)
        if first:
            self._on_signal()
