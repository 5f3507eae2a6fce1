"""Knows a hang from a slow step: no rank has moved for longer than this run ever needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Phase
from kempner.supervisor.control.events import LastReport
from kempner.supervisor.monitors.phase_durations import PhaseDurations

SILENT = 7.5
"""Seconds without a report after which a rank is not merely waiting: they come once a second, and
where they go by file, within seven."""

_ORDER = (
    *(Phase.START, Phase.RENDEZVOUS, Phase.LOAD),
    *(Phase.SAVE, Phase.EVAL, Phase.COMPILE, Phase.STEP, Phase.EXIT),
)
"""Phases as they follow each other after the same last step."""


@dataclass(frozen=True)
class Hang:
    """Nothing moves, in `phase` (of several the one that may take longest), for `still` seconds.

    `laggard` is the rank that the others wait for, as far as can be told.
    """

    sentence: str
    laggard: int | None
    phase: Phase
    still: float


class HangDetector:
    """Watches whether any rank moves: makes a step, or enters another phase.

    What is normal is learned from the run: `patience` is the configured multiple of the 95th
    percentile of what the phase takes (a step: of the time between two), at least the configured
    floor, and at most the phase's ceiling, which alone counts where nothing was learned.
    """

    def __init__(self, section: ResilienceSection, now: float) -> None:
        self._section = section
        self._places: dict[int, tuple[int, Phase]] = {}
        self._moved_at = now

    def see(
        self,
        last_reports: Mapping[int, LastReport],
        now: float,
        clock: float,
        usual: PhaseDurations,
    ) -> Hang | None:
        """Take a look; the hang, once there is one.

        `now` is in seconds of a clock that stands still while suspended, `clock` is the one on
        which sightings were made, `usual` what this run's phases take.
        """
        places = {rank: (s.report.step, s.report.phase) for rank, s in last_reports.items()}
        if places != self._places:
            self._places, self._moved_at = places, now
        still, (patience, phase) = now - self._moved_at, self.patience(usual)
        if still <= patience:
            return None
        laggard = behind_all_others(last_reports, clock)
        who = "" if laggard is None else f"; rank {laggard} is behind all others"
        where = ", ".join(sorted({f"step {step} ({phase})" for step, phase in places.values()}))
        return Hang(
            f"no rank has moved for {still:.0f} s, where {patience:.0f} s are plenty: "
            f"{where or 'none has reported yet'}{who}",
            laggard,
            phase,
            still,
        )

    def patience(self, usual: PhaseDurations) -> tuple[float, Phase]:
        """Seconds for which standing still here is no hang, and the phase that needs them."""
        phases = {phase for _, phase in self._places.values()} or {Phase.START}
        return max((self._patience(phase, usual), phase) for phase in phases)

    def _patience(self, phase: Phase, usual: PhaseDurations) -> float:
        section = self._section
        ceiling = section.hang_timeout_max_of.of(phase) or section.hang_timeout_max
        if phase not in usual:
            return ceiling
        return min(ceiling, max(section.hang_timeout_min, section.hang_factor * usual[phase].long))


def behind_all_others(last_reports: Mapping[int, LastReport], clock: float) -> int | None:
    """The rank that the others wait for; None if that cannot be told.

    The one that says nothing any more; or else the one that is a step or a phase behind; or else,
    among those, the one that does not itself wait for others.
    """
    silent = [rank for rank, seen in last_reports.items() if clock - seen.at > SILENT]
    if len(silent) == 1:
        return silent[0]
    places = {r: (s.report.step, _ORDER.index(s.report.phase)) for r, s in last_reports.items()}
    last = [rank for rank, place in places.items() if place == min(places.values())]
    if len(last) > 1:
        last = [rank for rank in last if not last_reports[rank].report.waiting]
    return last[0] if len(last) == 1 < len(places) else None
