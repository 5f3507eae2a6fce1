"""A clock that stops while this process is suspended."""

from __future__ import annotations

import time

LONGEST_NAP = 2.5
"""Seconds; more than a loop of ours ever waits between two looks, and less than any deadline."""


class AwakeClock:
    """Seconds that this process was there to see.

    Slurm may suspend a job for hours (PreemptMode=SUSPEND) and then let it go on: nobody has
    outstayed a deadline meanwhile. Between two looks at most `LONGEST_NAP` seconds pass.
    """

    def __init__(self) -> None:
        self._looked_at, self._now = time.monotonic(), 0.0
        self._woke_at: float | None = None

    def now(self) -> float:
        """Seconds since the clock was made."""
        at = time.monotonic()
        if at - self._looked_at > LONGEST_NAP:
            self._woke_at = at
        self._now += min(at - self._looked_at, LONGEST_NAP)
        self._looked_at = at
        return self._now

    def stood_still(self, seconds: float) -> bool:
        """Whether this process was suspended within the last `seconds`."""
        self.now()
        return self._woke_at is not None and self._looked_at - self._woke_at < seconds
