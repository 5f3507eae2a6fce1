"""What is normal in a run: how long each of its phases lasts. Kept in the ledger, for a restart."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Self, TypeAlias

from kempner.run.control.protocol import Phase
from kempner.run.record.events import PhaseDurationsLearned, PhaseTimes
from kempner.run.record.history import RunHistory
from kempner.run.record.save_times import nearest_rank


@dataclass(frozen=True)
class DurationStats:
    """How long something takes, in seconds, by `count` times that it was seen.

    `spread` is what the 95th percentile has above the median.
    """

    median: float
    spread: float
    count: int

    @property
    def long(self) -> float:
        """The 95th percentile in seconds: a long one, but none that is out of the ordinary."""
        return self.median + self.spread

    @classmethod
    def of(cls, seconds: Collection[float]) -> Self | None:
        """What these durations come to; None if there are none."""
        median, long = nearest_rank(seconds, 0.5), nearest_rank(seconds, 0.95)
        if median is None or long is None:
            return None
        return cls(round(median, 3), round(long - median, 3), len(seconds))


PhaseDurations: TypeAlias = Mapping[Phase, DurationStats]
"""What is known; for STEP, of the time between two steps."""


def to_event(phase_durations: PhaseDurations, ranks: int) -> PhaseDurationsLearned:
    """For the ledger: the durations with a number of `ranks`."""
    return PhaseDurationsLearned(
        ranks, {phase: PhaseTimes(**asdict(usual)) for phase, usual in phase_durations.items()}
    )


def learned(history: RunHistory, ranks: int) -> dict[Phase, DurationStats]:
    """The newest phase durations in a run's history with the same number of ranks.

    Of starts, the longest: ranks that are forked start at once, and the next job imports anew.
    """
    ours = [
        {
            phase: DurationStats(**asdict(event.phases[phase]))
            for phase in Phase
            if phase in event.phases
        }
        for event in history.events(PhaseDurationsLearned)
        if event.ranks == ranks
    ]
    starts = [each[Phase.START] for each in ours if Phase.START in each]
    longest = {Phase.START: max(starts, key=lambda start: start.long)} if starts else {}
    return {**ours[-1], **longest} if ours else {}


def longer(some: PhaseDurations, others: PhaseDurations) -> dict[Phase, DurationStats]:
    """Of two experiences with the same phase, the one that allows more time."""
    together = dict(others)
    for phase, usual in some.items():
        other = together.get(phase, usual)
        together[phase] = max(usual, other, key=lambda each: each.long)
    return together
