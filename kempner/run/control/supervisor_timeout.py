"""Measures how long the other side has been silent, on this process's own clock."""

from __future__ import annotations

from kempner.run.process.awake_clock import AwakeClock


class SupervisorTimeout:
    """Counts the seconds since something was last heard, but for those spent suspended."""

    def __init__(self, limit: float) -> None:
        self._limit, self._clock = limit, AwakeClock()
        self._heard_at = 0.0
        self.noticed = False
        self.times_broken = 0
        self.refuses = False
        """Whether the port refused the last connection, though the machine answered."""

    @property
    def seconds(self) -> float:
        """Since something was last heard."""
        return self._clock.now() - self._heard_at

    def broken(self) -> None:
        """Note that the supervisor was heard."""
        self._heard_at, self.noticed, self.refuses = self._clock.now(), False, False
        self.times_broken += 1

    def exceeds_limit(self) -> bool:
        """Look at the clock: whether the limit is passed, told once for each silence."""
        if self.noticed or self.seconds < self._limit:
            return False
        self.noticed = True
        return True
