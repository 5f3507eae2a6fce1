"""What is normal in a run: how long each of its phases lasts. Kept in the ledger, for a restart."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self, TypeAlias

from kempner.run.control.protocol import Phase
from kempner.run.record.save_times import nearest_rank

LEARNED = "phase_durations"
"""The ledger's event that carries them."""


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


def to_fields(phase_durations: PhaseDurations) -> dict[str, dict[str, float]]:
    """For the ledger."""
    return {phase: asdict(usual) for phase, usual in phase_durations.items()}


def learned(events: Iterable[Mapping[str, Any]], ranks: int) -> dict[Phase, DurationStats]:
    """The newest habits of so many ranks that a run's ledger tells of."""
    phases: Mapping[str, Mapping[str, Any]] = {}
    for event in events:
        if event.get("event") == LEARNED and event["ranks"] == ranks:
            phases = event["phases"]
    return {Phase(phase): DurationStats(**usual) for phase, usual in phases.items()}


def longer(some: PhaseDurations, others: PhaseDurations) -> dict[Phase, DurationStats]:
    """Of two experiences with the same phase, the one that allows more time."""
    together = dict(others)
    for phase, usual in some.items():
        other = together.get(phase, usual)
        together[phase] = max(usual, other, key=lambda each: each.long)
    return together
