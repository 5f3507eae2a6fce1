"""How long things take in a run: its phases and its saves, by a clock that knows of suspensions."""

from __future__ import annotations

from typing import Self

from kempner.run.control.protocol import Phase
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.record.history import RunHistory
from kempner.run.record.save_times import Durations, SaveSeconds
from kempner.supervisor.monitors.phase_durations import learned
from kempner.supervisor.monitors.phase_stats import PhaseStats


class RunTimes:
    """Of one attempt, which begins now, with what is known of the ones before it."""

    def __init__(self, phases: PhaseStats | None = None, saves: Durations | None = None) -> None:
        self._clock = AwakeClock()
        self.phases, self.saves = phases or PhaseStats(), saves or Durations()

    @classmethod
    def from_history(cls, past: RunHistory, size: int) -> Self:
        """What the run's history tells an attempt of `size` ranks."""
        # A start without a checkpoint says nothing about how long it takes to load one.
        unlike = () if past.last_step else (Phase.LOAD,)
        return cls(PhaseStats(learned(past, size), unlike), past.durations)

    def now(self) -> float:
        """Seconds since the attempt began, without those spent suspended."""
        return self._clock.now()

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
