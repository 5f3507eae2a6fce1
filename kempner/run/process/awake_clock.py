"""A clock that stops while this process is suspended."""

from __future__ import annotations

import time
from math import inf

LONGEST_NAP = 2.5
"""Seconds; more than a loop of ours ever waits between two looks, and less than any deadline."""


class AwakeClock:
    """A clock that does not count the time for which this process was suspended.

    Slurm may suspend a job for hours (PreemptMode=SUSPEND) and then let it go on: no deadline may
    pass meanwhile. Between two looks at most `LONGEST_NAP` seconds are counted.
    """

    def __init__(self) -> None:
        self._looked_at, self._now = time.monotonic(), 0.0
        self._woke_at: float | None = None
        self._woke = -inf

    def now(self) -> float:
        """Seconds since the clock was made."""
        at = time.monotonic()
        slept = at - self._looked_at > LONGEST_NAP
        self._now += min(at - self._looked_at, LONGEST_NAP)
        self._looked_at = at
        if slept:
            self._woke_at, self._woke = at, self._now
        return self._now

    @property
    def woke_at(self) -> float:
        """When the last suspension was over, by this clock; minus infinity before any."""
        return self._woke

    def stood_still(self, seconds: float) -> bool:
        """Whether this process was suspended within the last `seconds`."""
        self.now()
        return self._woke_at is not None and self._looked_at - self._woke_at < seconds
