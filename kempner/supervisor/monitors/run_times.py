"""How long things take in a run: its phases and its saves, by a clock that knows of suspensions."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Self

from kempner.run.control.protocol import Phase
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.record.events import HangFound, JobHandedBack
from kempner.run.record.history import RunHistory
from kempner.run.record.save_times import REMEMBERED, Durations, SaveSeconds
from kempner.supervisor.monitors.phase_durations import learned
from kempner.supervisor.monitors.phase_stats import PhaseStats


class RunTimes:
    """Of one attempt, which begins now, with what is known of the ones before it."""

    def __init__(
        self,
        phases: PhaseStats | None = None,
        saves: Durations | None = None,
        leaves: Sequence[float] = (),
        hung: Mapping[int, float] | None = None,
    ) -> None:
        self._clock = AwakeClock()
        self.phases, self.saves = phases or PhaseStats(), saves or Durations()
        self.leaves = leaves
        """Seconds from the last rank's exit until the job was back in the queue, as often as that
        was measured."""
        self.hung = hung or {}
        """See `hung_at_work`."""
        self._left_at: float | None = None

    @classmethod
    def from_history(cls, past: RunHistory, size: int) -> Self:
        """What the run's history tells an attempt of `size` ranks."""
        # A start without a checkpoint says nothing about how long it takes to load one.
        unlike = () if past.last_step else (Phase.LOAD,)
        leaves = [event.seconds for event in past.events(JobHandedBack)][-REMEMBERED:]
        phases = PhaseStats(learned(past, size), unlike)
        return cls(phases, past.durations, leaves, hung_at_work(past))

    def now(self) -> float:
        """Seconds since the attempt began, without those spent suspended."""
        return self._clock.now()

    @property
    def woke_at(self) -> float:
        """When this process last went on after it was suspended; minus infinity before that."""
        return self._clock.woke_at

    def ranks_left(self) -> None:
        """The last rank has left, or was killed; the first time counts."""
        if self._left_at is None:
            self._left_at = time.monotonic()

    def seconds_since_left(self) -> float:
        """Since then; 0 before that. Not by the clock that needs to be looked at to go on."""
        return 0.0 if self._left_at is None else time.monotonic() - self._left_at

    def saved(self, save: SaveSeconds) -> bool:
        """A save took so long; False if it does not count, because the job was suspended in it."""
        if self._clock.stood_still(save.total):
            return False
        self.saves = self.saves.with_another(save)
        self.phases.took(Phase.SAVE, save.total)
        return True

    def evaluated(self, seconds: float) -> None:
        """An evaluation took so long."""
        if not self._clock.stood_still(seconds):
            self.phases.took(Phase.EVAL, seconds)


def hung_at_work(past: RunHistory) -> dict[int, float]:
    """The longest standstills in seconds that were ended for a hang while a rank may have been at
    work, by the last step that was done."""
    longest: dict[int, float] = {}
    for hang in past.events(HangFound):
        if (stands := hang.own_program) is not None and stands.busy is not None:
            longest[stands.step] = max(longest.get(stands.step, 0.0), hang.seconds or 0.0)
    return longest
