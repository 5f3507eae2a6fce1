"""Progress watchdog: whether a process still completes steps or changes phase."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from kempner.run.control.heartbeat import Progress
from kempner.run.control.protocol import Phase
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.retry import storage_waits

LONGER_THAN_ANY = 10.0
"""How many times the longest step so far a step may take before it counts as a hang."""

Place = TypeVar("Place")


@dataclass(frozen=True)
class Standstill(Generic[Place]):
    """Something has been in `place` since `since`, in seconds of some clock."""

    place: Place
    since: float

    def seen(self, place: Place, now: float) -> Standstill[Place]:
        """What it is now that it was seen in a place."""
        return self if place == self.place else Standstill(place, now)

    def seconds(self, now: float) -> float:
        """For how long it has not moved."""
        return now - self.since


def patience(floor: float, ceiling: float, long: float | None) -> float:
    """Seconds for which standing still is no hang, where a `long` time was learned; None: nothing.

    At least `floor`, and at most `ceiling`, which alone counts where nothing was learned.
    """
    return ceiling if long is None else min(ceiling, max(floor, long))


class ProgressWatchdog:
    """Counts the seconds since the last move, but for those spent suspended.

    Within a step `floor` seconds are never too long, in any other phase `ceiling` seconds.
    """

    def __init__(self, progress: Progress, floor: float, ceiling: float) -> None:
        self._progress, self._floor, self._ceiling = progress, floor, ceiling
        self._clock = AwakeClock()
        self._still = Standstill(self._place(), 0.0)
        self._longest = 0.0

    @property
    def seconds(self) -> float:
        """Since the last move, as far as it was looked at."""
        return self._still.seconds(self._clock.now())

    def _place(self) -> tuple[int, Phase, int]:
        """Where the process is; another try of storage that fails is a move, too."""
        return self._progress.step, self._progress.phase, storage_waits().tries

    def too_long(self) -> bool:
        """Take a look: whether what is under way takes longer than it can."""
        now, before = self._clock.now(), self._still
        self._still = before.seen(self._place(), now)
        in_step = self._still.place[1] is Phase.STEP
        made = self._still.place[0] > before.place[0]
        if in_step and before.place[1] is Phase.STEP and made:
            self._longest = max(self._longest, before.seconds(now))
        long = LONGER_THAN_ANY * self._longest if in_step else None
        return self._still.seconds(now) > patience(self._floor, self._ceiling, long)
