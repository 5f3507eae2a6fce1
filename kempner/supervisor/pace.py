"""How fast the run steps, as its reports show it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from kempner.checkpoint.durations import nearest_rank
from kempner.run.messages import Phase
from kempner.supervisor.news import Sighting

REMEMBERED = 100
"""Steps that count."""


class Pace:
    """The seconds between steps, of the rank that is ahead, to the resolution of its reports."""

    def __init__(self) -> None:
        self._gaps: deque[float] = deque(maxlen=REMEMBERED)
        self._last: tuple[int, float] | None = None

    def see(self, sightings: Mapping[int, Sighting], now: float) -> None:
        """Take note of new reports. Evaluations and saves are no steps, and do not count.

        `now` is in seconds of a clock that stands still while suspended: no step takes a night.
        """
        newest = max(sightings.values(), key=lambda seen: seen.report.step, default=None)
        if newest is None:
            return
        step = newest.report.step
        if newest.report.phase is not Phase.STEP:
            self._last = None
        elif self._last is None or step < self._last[0]:
            self._last = (step, now)
        elif step > self._last[0]:
            since, started = self._last
            self._gaps.extend([(now - started) / (step - since)] * min(step - since, REMEMBERED))
            self._last = (step, now)

    def quantile(self, fraction: float) -> float | None:
        """The seconds that `fraction` (0 to 1) of the last steps stayed within; None before any."""
        return nearest_rank(self._gaps, fraction)
