"""Knows a hang from a slow step: no rank has moved for longer than this run ever needs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import TypeAlias

from kempner.config.resilience import ResilienceSection
from kempner.run.control.progress_watchdog import Standstill, patience
from kempner.run.control.protocol import Phase
from kempner.run.process.retry import LONGEST_PAUSE
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import Hang
from kempner.supervisor.monitors.phase_durations import PhaseDurations

_ORDER = (
    *(Phase.START, Phase.RENDEZVOUS, Phase.LOAD),
    *(Phase.SAVE, Phase.EVAL, Phase.COMPILE, Phase.STEP, Phase.EXIT),
)
"""Phases as they follow each other after the same last step."""

STORAGE_TRIES = 3 * LONGEST_PAUSE
"""Seconds within which a rank that waits for storage tries again, and thereby moves."""

GROWTH = 5.0
"""How many times as long a standstill must last as one that was ended for a hang after the same
step, where a rank may have been at work."""

NAMED = 10
"""Ranks that a sentence names at most."""

_Places: TypeAlias = dict[int, tuple[int, Phase, int]]


class HangDetector:
    """Watches whether any rank moves: makes a step, enters another phase, or tries again what
    storage has refused. While a rank does that, nobody hangs; its own patience ends it.

    What is normal is learned from the run: `patience` is the configured multiple of the 95th
    percentile of what the phase takes (a step: of the time between two), at least the configured
    floor, and at most the phase's ceiling, which alone counts where nothing was learned. Ranks that
    `must_report` hang if they never do; of others that never do nothing is known. Of a program that
    never connects, whose steps are read from files, only the ceiling counts: nobody knows what it
    does between two steps.

    A program of the user's own may also be at work between two steps, see `_own_limit`; `hung` has
    the longest standstill that was ended for a hang while a rank may have been at work, by step.
    """

    def __init__(
        self,
        section: ResilienceSection,
        now: float,
        must_report: bool = True,
        hung: Mapping[int, float] | None = None,
    ) -> None:
        self._section, self._must_report, self._hung = section, must_report, hung or {}
        self._still: Standstill[_Places] = Standstill({}, now)
        self._stacks: Standstill[dict[int, int]] = Standstill({}, now)

    def check(self, snapshot: Snapshot) -> Sequence[Hang]:
        """The hang, for as long as there is one."""
        places = {rank: (r.step, r.phase, r.moves.tries) for rank, r in snapshot.reports.items()}
        if snapshot.around.unstarted:
            self._still = Standstill(places, snapshot.now)
        self._still = self._still.seen(places, snapshot.now)
        known = snapshot.usual if self._must_report or snapshot.joined else {}
        moves = {rank: report.moves.stacks for rank, report in snapshot.reports.items()}
        self._stacks = self._stacks.seen(moves, snapshot.now)
        still, (limit, phase) = self._still.seconds(snapshot.now), self.patience(known)
        if not self._must_report and snapshot.joined:
            limit = self._own_limit(snapshot, limit)
        if any(report.storage for report in snapshot.reports.values()):
            limit = max(limit, STORAGE_TRIES)
        if still <= limit:
            return ()
        if not places and not self._must_report:
            return ()
        absent = silent_from_the_start(snapshot) if self._must_report else []
        laggard = absent[0] if len(absent) == 1 else behind_all_others(snapshot)
        who = "" if laggard is None else f"; rank {laggard} is behind all others"
        if absent and places:
            who = f"; {_listed(absent)} never connected"
        where = ", ".join(sorted({f"step {step} ({phase})" for step, phase, _ in places.values()}))
        longer, shorter = _told_apart(still, limit)
        sentence = (
            f"no rank has moved for {longer} s, longer than the {shorter} s that this run "
            f"ever needs: {where or 'none has reported yet'}{who}"
        )
        return (Hang(sentence, laggard, phase, still),)

    def patience(self, usual: PhaseDurations) -> tuple[float, Phase]:
        """Seconds for which standing still here is no hang, and the phase that needs them."""
        phases = {phase for _, phase, _ in self._still.place.values()} or {Phase.START}
        return max((self._patience(phase, usual), phase) for phase in phases)

    def _own_limit(self, snapshot: Snapshot, limit: float) -> float:
        """Seconds for which a program of the user's own may stand still, by its stacks.

        Without a limit of its own an evaluation has none, unless all ranks wait for each other in
        collectives; nor has what follows the loop, as long as a stack moves. Between two steps a
        stack that moves gets the ceiling.
        """
        phases = {report.phase for report in snapshot.reports.values()}
        moving = self._stacks.seconds(snapshot.now) <= self._section.hang_timeout_min
        if Phase.EVAL in phases and self._section.hang_timeout_max_of.eval is None:
            evaluates = (
                report.phase is Phase.EVAL and not report.waiting and rank not in snapshot.silent
                for rank, report in snapshot.reports.items()
            )
            if moving or any(evaluates):
                return inf
        if moving:
            last = phases == {Phase.EXIT}
            limit = inf if last else max([limit, *map(self._ceiling, phases)])
        step = max((report.step for report in snapshot.reports.values()), default=0)
        most = max(self._section.hang_timeout_max, GROWTH**2 * self._section.hang_timeout_min)
        return max(limit, min(most, GROWTH * self._hung.get(step, 0.0)))

    def _ceiling(self, phase: Phase) -> float:
        return self._section.hang_timeout_max_of.of(phase) or self._section.hang_timeout_max

    def _patience(self, phase: Phase, usual: PhaseDurations) -> float:
        section, ceiling = self._section, self._ceiling(phase)
        long = section.hang_factor * usual[phase].long if phase in usual else None
        return patience(section.hang_timeout_min, ceiling, long)


def _told_apart(longer: float, shorter: float) -> tuple[str, str]:
    """Two numbers with as few digits as show that they differ."""
    for digits in range(3):
        if f"{longer:.{digits}f}" != f"{shorter:.{digits}f}":
            break
    return f"{longer:.{digits}f}", f"{shorter:.{digits}f}"


def silent_from_the_start(snapshot: Snapshot) -> list[int]:
    """The ranks that have said nothing in this attempt: their tasks may never have started."""
    known = snapshot.reports.keys() | snapshot.joined.keys()
    return [rank for rank in range(snapshot.size) if rank not in known]


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED]))}{more} have"


def behind_all_others(snapshot: Snapshot) -> int | None:
    """The rank that the others wait for; None if that cannot be told.

    The one that says nothing any more; or else the one that is a step or a phase behind; or else,
    among those, the one that does not itself wait for others.
    """
    if len(snapshot.silent) == 1:
        return next(iter(snapshot.silent))
    reports = snapshot.reports
    places = {rank: (r.step, _ORDER.index(r.phase)) for rank, r in reports.items()}
    last = [rank for rank, place in places.items() if place == min(places.values())]
    if len(last) > 1:
        last = [rank for rank in last if not reports[rank].waiting]
    return last[0] if len(last) == 1 < len(places) else None
