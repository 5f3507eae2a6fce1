"""When a rank has waited long enough: for its supervisor, for the others, for a lost peer's end."""

from __future__ import annotations

import time
from enum import Enum, auto

from kempner.run.control.heartbeat import Progress
from kempner.run.control.progress_watchdog import ProgressWatchdog
from kempner.run.control.supervisor_timeout import SupervisorTimeout

PEER_LOST_GRACE = 1.0
"""Seconds that the main thread gets to leave by itself when a peer is gone."""


class Overdue(Enum):
    """What has taken too long; each is told once."""

    SUPERVISOR = auto()
    """The supervisor has said nothing."""
    STEP = auto()
    """Nothing moves, and there is no supervisor to say why."""
    EXIT = auto()
    """The main thread has not left, though a peer is gone."""


class RankDeadlines:
    """The clocks that a rank's link looks at. `patience` and `grace` are those of `Reactions`."""

    def __init__(self, progress: Progress, patience: float, grace: float) -> None:
        self.supervisor = SupervisorTimeout(patience)
        self.step = ProgressWatchdog(progress, patience, grace)
        self._forsaken = False
        self._exit_at: float | None = None

    def peer_lost(self) -> None:
        """From now on the main thread has `PEER_LOST_GRACE` seconds to leave."""
        self._exit_at = time.monotonic() + PEER_LOST_GRACE

    def look(self) -> list[Overdue]:
        """What is overdue now and was not before."""
        found = []
        if self.supervisor.exceeds_limit():
            found.append(Overdue.SUPERVISOR)
        if self.step.too_long() and self.supervisor.noticed and not self._forsaken:
            self._forsaken = True
            found.append(Overdue.STEP)
        if self._exit_at is not None and time.monotonic() >= self._exit_at:
            self._exit_at = None
            found.append(Overdue.EXIT)
        return found

    def wake_at(self, until: float) -> float:
        """`until`, or the exit if that comes first; seconds of `time.monotonic`."""
        return until if self._exit_at is None else min(until, self._exit_at)
