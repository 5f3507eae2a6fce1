"""Knows a hang from a slow step: no rank has moved for longer than this run ever needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kempner.config.sections import ResilienceSection
from kempner.run.messages import Phase
from kempner.supervisor.news import Sighting

SILENT = 5.0
"""Seconds without a report after which a rank is not merely waiting: they come once a second."""


@dataclass(frozen=True)
class Hang:
    """Nothing moves. `laggard` is the rank that the others wait for, as far as can be told."""

    sentence: str
    laggard: int | None


class Stillness:
    """Watches whether any rank moves: makes a step, or enters another phase.

    What is normal is learned from the run: `patience` is the configured multiple of the 95th
    percentile of the time between its steps, and at least the configured floor. Whatever is no
    step (start, load, evaluation, save) has the configured ceiling.
    """

    def __init__(self, section: ResilienceSection, now: float) -> None:
        self._section = section
        self._places: dict[int, tuple[int, Phase]] = {}
        self._moved_at = now

    def see(
        self, sightings: Mapping[int, Sighting], now: float, clock: float, gap: float | None
    ) -> Hang | None:
        """Take a look; the hang, once there is one.

        `now` and `gap` (between steps, None if unknown) are in seconds of a clock that stands still
        while suspended, `clock` is the one on which sightings were made.
        """
        places = {rank: (s.report.step, s.report.phase) for rank, s in sightings.items()}
        if places != self._places:
            self._places, self._moved_at = places, now
        still, patience = now - self._moved_at, self.patience(gap)
        if still <= patience:
            return None
        laggard = self._laggard(sightings, clock)
        who = "" if laggard is None else f"; rank {laggard} is behind all others"
        where = ", ".join(sorted({f"step {step} ({phase})" for step, phase in places.values()}))
        return Hang(
            f"no rank has moved for {still:.0f} s, where {patience:.0f} s are plenty: "
            f"{where or 'none has reported yet'}{who}",
            laggard,
        )

    def patience(self, gap: float | None) -> float:
        """Seconds for which standing still is no hang."""
        section = self._section
        stepping = self._places and all(phase is Phase.STEP for _, phase in self._places.values())
        if not stepping or gap is None:
            return section.hang_ceiling
        return min(section.hang_ceiling, max(section.hang_floor, section.hang_factor * gap))

    def _laggard(self, sightings: Mapping[int, Sighting], clock: float) -> int | None:
        """The one rank that says nothing any more, or else the one with the fewest steps."""
        silent = [rank for rank, seen in sightings.items() if clock - seen.at > SILENT]
        if len(silent) == 1:
            return silent[0]
        steps = {rank: step for rank, (step, _) in self._places.items()}
        behind = [rank for rank, step in steps.items() if step == min(steps.values())]
        return behind[0] if len(behind) == 1 < len(steps) else None
