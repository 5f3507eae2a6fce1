"""What monitors find: records for the reporter, who turns them into log lines and ledger events."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kempner.run.control.protocol import Phase
from kempner.run.record.events import SlowDownFound, StragglerFound
from kempner.supervisor.monitors.phase_durations import PhaseDurations


@dataclass(frozen=True)
class Hang:
    """Nothing moves, in `phase` (of several the one that may take longest), for `still` seconds.

    `laggard` is the rank that the others wait for, as far as can be told.
    """

    sentence: str
    laggard: int | None
    phase: Phase
    still: float


@dataclass(frozen=True)
class Straggler:
    """A rank that works `worked` seconds per step, where the median of the others is `usual`.

    `lost` (0 to 1) is the share of each step that the others wait for it.
    """

    rank: int
    worked: float
    usual: float
    lost: float

    @property
    def sentence(self) -> str:
        """For a person to read."""
        return (
            f"works {self.worked:.3g} s per step, where the others need {self.usual:.3g} s: "
            f"{self.lost:.0%} of the run's time is spent waiting for it"
        )


@dataclass(frozen=True)
class SlowDown:
    """Steps take `step` seconds, where they used to take `usual`."""

    step: float
    usual: float

    @property
    def sentence(self) -> str:
        """For a person to read."""
        return (
            f"a step takes {self.step:.3g} s, {self.step / self.usual:.1f} times as long as the "
            f"{self.usual:.3g} s that are usual for this run"
        )


@dataclass(frozen=True)
class Recovery:
    """A straggler, or a slow-down of the run, is over: `of` is the event that said it began."""

    of: type[StragglerFound] | type[SlowDownFound]


@dataclass(frozen=True)
class Shortage:
    """The node of `rank`, its largest, has little memory left; `reason` is for a person to read."""

    rank: int
    reason: str


@dataclass(frozen=True)
class SteadyGrowth:
    """What `rank` uses grows without end; `reason` is for a person to read."""

    rank: int
    reason: str


@dataclass(frozen=True)
class PhasesLearned:
    """How long the phases of this run take: worth a note, in case the supervisor dies."""

    phases: PhaseDurations


Remark: TypeAlias = Straggler | SlowDown | Recovery | Shortage | SteadyGrowth | PhasesLearned
"""What is told, and has no other consequence."""

Finding: TypeAlias = Hang | Remark
