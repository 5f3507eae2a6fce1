"""How long the other side has said nothing, by this process's own clock."""

from __future__ import annotations

import time

LONGEST_NAP = 10.0
"""Seconds; more than a thread of ours ever waits between two looks."""


class Silence:
    """Counts the seconds since something was last heard.

    A process that was suspended did not listen: between two looks at most `LONGEST_NAP` seconds
    count.
    """

    def __init__(self, limit: float) -> None:
        self._limit, self.seconds = limit, 0.0
        self.noticed = False
        self._looked_at = time.monotonic()

    def broken(self) -> None:
        """Something was heard."""
        self.seconds, self.noticed = 0.0, False

    def exceeds_limit(self) -> bool:
        """Look at the clock: whether the limit is passed, told once for each silence."""
        now = time.monotonic()
        self.seconds += min(now - self._looked_at, LONGEST_NAP)
        self._looked_at = now
        if self.noticed or self.seconds < self._limit:
            return False
        self.noticed = True
        return True
