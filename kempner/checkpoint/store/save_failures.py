"""Counts saves that failed in a row, and tells when to try the next one: a pure record."""

from __future__ import annotations

import math
from dataclasses import dataclass

FIRST_PAUSE, LONGEST_PAUSE = 1.0, 15.0
"""Seconds from the second failure to the next try, and the most, but for saves that take longer to
fail: each pause is twice as long as the last. After the first failure nothing is waited for; after
the second it will take a while: a full disk is as full after the next step."""


@dataclass(frozen=True)
class SaveFailures:
    """Saves that failed since the last commit. Times are in seconds of one clock.

    `since` is when the first one had failed, `last` when the newest had, and `took` how long that
    was under way. `reason` says why, and `passing` whether time may heal it: storage that refused.
    """

    count: int = 0
    since: float = 0.0
    last: float = 0.0
    took: float = 0.0
    reason: str = ""
    passing: bool = True

    def with_another(self, now: float, took: float, reason: str, passing: bool) -> SaveFailures:
        """These and one more."""
        since = self.since if self.count else now
        return SaveFailures(self.count + 1, since, now, took, reason, passing)

    def lasting(self, now: float) -> float:
        """For how many seconds no save has worked; infinite where time does not heal it."""
        if not self.count:
            return 0.0
        return now - self.since if self.passing else math.inf

    @property
    def pause(self) -> float:
        """Seconds between the last failure and the next try."""
        if self.count <= 1:
            return 0.0
        pause = min(FIRST_PAUSE * 2.0 ** min(self.count - 2, 10), LONGEST_PAUSE)
        return max(pause, self.took)

    def due(self, now: float) -> bool:
        """Whether it is time for the next try."""
        return self.count > 0 and now - self.last >= self.pause
