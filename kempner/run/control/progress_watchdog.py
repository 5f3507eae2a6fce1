"""Progress watchdog: whether this process still completes steps or changes phase."""

from __future__ import annotations

from kempner.run.control.heartbeat import Progress
from kempner.run.control.protocol import Phase
from kempner.run.process.awake_clock import AwakeClock

LONGER_THAN_ANY = 10.0
"""How many times the longest step so far a step may take before nobody waits for it any more."""


class ProgressWatchdog:
    """Counts the seconds since the last move, but for those spent suspended.

    Within a step `floor` seconds are never too long, in any other phase `ceiling` seconds.
    """

    def __init__(self, progress: Progress, floor: float, ceiling: float) -> None:
        self._progress, self._floor, self._ceiling = progress, floor, ceiling
        self._clock = AwakeClock()
        self._place = (progress.step, progress.phase)
        self._moved_at = self._longest = 0.0

    @property
    def seconds(self) -> float:
        """Since the last move, as far as it was looked at."""
        return self._clock.now() - self._moved_at

    def too_long(self) -> bool:
        """Take a look: whether what is under way takes longer than it can."""
        before, self._place = self._place, (self._progress.step, self._progress.phase)
        if self._place != before:
            if self._place[1] is before[1] is Phase.STEP:
                self._longest = max(self._longest, self.seconds)
            self._moved_at = self._clock.now()
        in_step = self._place[1] is Phase.STEP
        limit = max(self._floor, LONGER_THAN_ANY * self._longest) if in_step else self._ceiling
        return self.seconds > min(limit, self._ceiling)
