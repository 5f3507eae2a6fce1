"""How fast the run goes, as its reports show it."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

from kempner.run.control.protocol import Phase
from kempner.run.record.save_times import nearest_rank
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import PhasesLearned
from kempner.supervisor.monitors.phase_durations import DurationStats, PhaseDurations, longer

REMEMBERED = 100
"""Steps that count."""

_TO_THE_FIRST_STEP = (Phase.START, Phase.RENDEZVOUS, Phase.LOAD, Phase.COMPILE)
"""Phases that every attempt goes through, in this order."""

_TOLD_LITTLE = (Phase.SAVE, Phase.EXIT)
"""Phases of which reports tell little: training waits for a save only if the next one is due, or it
is the last. What saves take, their commits tell."""

SETTLES = 2.0
"""Seconds after a suspension of the supervisor in which it reads what came meanwhile."""

ENOUGH = 20
"""Steps after which those of an earlier attempt count no more."""

RECORD_EVERY = 600.0
"""Seconds between two notes of how long the phases of the run take, in case this process dies."""


class PhaseStats:
    """The seconds between steps and those that other phases take.

    Of the rank that is ahead, to the resolution of its reports: what is over within a second may
    never be seen, and on the way to the first step took at most the time between two that were.
    Commits and evaluations tell how long they took. Time in which a rank waited for storage is not
    learned. `before` is what earlier attempts came to; phases in `unlike` say nothing about the
    next attempt, and are not learned.
    """

    def __init__(
        self, before: PhaseDurations | None = None, unlike: Collection[Phase] = ()
    ) -> None:
        self._before, self._unlike = before or {}, unlike
        self._seen: dict[Phase, deque[float]] = {}
        self._phase, self._step, self._since = Phase.START, 0, 0.0
        self._begun = self._disturbed = False
        self._told_at = 0.0
        self._first_steps: float | None = None
        """Seconds in which the first steps were made, with all that may have come before them."""

    def check(self, snapshot: Snapshot) -> Sequence[PhasesLearned]:
        """Take note of new reports; from time to time, what they have come to."""
        self._follow(snapshot)
        if snapshot.now - self._told_at <= RECORD_EVERY:
            return ()
        self._told_at = snapshot.now
        return self.findings()

    def findings(self) -> Sequence[PhasesLearned]:
        """What there is to tell by now."""
        learned = self.learned()
        return (PhasesLearned(learned),) if learned else ()

    def _follow(self, snapshot: Snapshot) -> None:
        now = snapshot.now
        newest = max(snapshot.reports.values(), key=lambda report: report.step, default=None)
        if newest is None:
            return
        waiting = any(report.storage for report in snapshot.reports.values())
        self._disturbed = self._disturbed or waiting
        step, phase, took = newest.step, newest.phase, now - self._since
        if (step, phase) == (self._step, self._phase):
            return
        if self._disturbed:
            self._disturbed = waiting
        elif snapshot.around.woke_at + SETTLES < self._since:
            self._learn(step, phase, took)
        self._phase, self._step, self._since = phase, step, now
        self._begun = self._begun or phase not in _TO_THE_FIRST_STEP

    def _learn(self, step: int, phase: Phase, took: float) -> None:
        """The phase and the step before took so long."""
        made = step - self._step
        for passed in self._passed(phase):
            self.took(passed, took)
        if phase is Phase.STEP and self._phase in (Phase.LOAD, Phase.COMPILE):
            self._first_steps = took
        if phase is Phase.STEP and self._phase is Phase.STEP and made > 0:
            self.took(Phase.STEP, took / made, min(made, REMEMBERED))
        elif phase is Phase.STEP and self._phase is Phase.COMPILE and made > 1:
            self.took(Phase.STEP, took / made)  # at most: the first step is in it

    def _passed(self, phase: Phase) -> Collection[Phase]:
        """The phases that are over, now that it is `phase`, and of which reports can tell."""
        if phase is self._phase or self._phase in (Phase.STEP, *_TOLD_LITTLE):
            return ()
        if self._begun:
            return (self._phase,)
        way = (*_TO_THE_FIRST_STEP, phase)
        return way[way.index(self._phase) : way.index(phase)]

    def took(self, phase: Phase, seconds: float, times: int = 1) -> None:
        """A phase took so long."""
        if phase not in self._unlike:
            self._seen.setdefault(phase, deque(maxlen=REMEMBERED)).extend([seconds] * times)

    def note_false_hang(self, phase: Phase, seconds: float) -> None:
        """Standing still in a phase was taken for a hang.

        It may have been none: the next attempt shall not fail for the same reason. Steps are
        measured often enough to be sure.
        """
        if phase is not Phase.STEP:
            self.took(phase, seconds)

    def quantile(self, fraction: float) -> float | None:
        """The seconds that `fraction` (0 to 1) of the last steps stayed within; None before any."""
        return nearest_rank(self._seen.get(Phase.STEP, ()), fraction)

    def learned(self) -> dict[Phase, DurationStats]:
        """What this attempt was like, and where it says nothing, what the ones before it were."""
        return {**self._before, **self._own()}

    def usual(self) -> dict[Phase, DurationStats]:
        """What is to be expected of this attempt: of what is not yet sure, the longest seen."""
        own = self._own()
        unknown = Phase.STEP not in own and Phase.STEP not in self._before
        if unknown and self._first_steps is not None:
            own[Phase.STEP] = DurationStats(self._first_steps, 0.0, 1)  # at most
        if Phase.STEP in own and own[Phase.STEP].count >= ENOUGH:
            return longer(own, {p: u for p, u in self._before.items() if p is not Phase.STEP})
        return longer(own, self._before)

    def _own(self) -> dict[Phase, DurationStats]:
        summed = {phase: DurationStats.of(seconds) for phase, seconds in self._seen.items()}
        return {phase: usual for phase, usual in summed.items() if usual is not None}
