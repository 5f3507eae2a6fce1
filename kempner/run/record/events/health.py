"""Events about ranks that hang, are slow, or use up what their node has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from kempner.run.record.events.base import LedgerEvent, RankNumber, Sentence


@dataclass(frozen=True)
class OwnProgramStands:
    """Where a program of the user's own stands in a hang, by its stacks."""

    step: int
    places: Mapping[str, str]
    busy: int | None = None


@dataclass(frozen=True)
class HangFound(LedgerEvent):
    """By the supervisor: when no rank moves any more, and the attempt is ended for it."""

    name: ClassVar[str] = "hang"
    reason: Sentence
    laggard: Annotated[int | None, "rank that the others wait for, as far as can be told"]
    waiting: Annotated[Mapping[str, Sequence[int]], "ranks by what they wait for others in"]
    processes: Annotated[tuple[str, ...], "what the system says of suspicious processes"]
    seconds: Annotated[float | None, "seconds since a rank last moved"] = None
    evidence_seconds: Annotated[
        float | None, "how many of them were spent on collecting evidence"
    ] = None
    own_program: Annotated[
        OwnProgramStands | None,
        "of a user's own program: its last `step` that was done, the `places` in its code by rank, "
        "and the rank that may have been at work there (`busy`), if one was",
    ] = None


@dataclass(frozen=True)
class ConnectionsStalled(LedgerEvent):
    """By any rank: in a hang, when connections of its node deliver nothing.

    For the supervisor, which does not put it into the ledger.
    """

    name: ClassVar[str] = "stalled"
    ends: Annotated[tuple[tuple[str, str], ...], "near and far address of each connection"]


@dataclass(frozen=True)
class StandsAt(LedgerEvent):
    """By any rank: in a hang of a program of the user's own, to tell where its main thread is.

    For the supervisor, which does not put it into the ledger.
    """

    name: ClassVar[str] = "stands_at"
    line: Annotated[str, "the innermost line of the user's code, as FILE:LINE, empty if unknown"]
    collective: Annotated[str, "the collective that it waits in, empty if there is none"]


@dataclass(frozen=True)
class StragglerFound(LedgerEvent):
    """By the supervisor: when the others begin to wait for one rank that is slower."""

    name: ClassVar[str] = "straggler"
    rank: RankNumber
    node: Annotated[str | None, "its node"]
    worked: Annotated[float, "seconds per step that it works"]
    usual: Annotated[float, "seconds per step that the others work"]
    lost: Annotated[float, "share (0 to 1) of each step that the others wait"]
    reason: Sentence


@dataclass(frozen=True)
class SlowDownFound(LedgerEvent):
    """By the supervisor: when steps begin to take longer than they used to."""

    name: ClassVar[str] = "slow_down"
    step: Annotated[float, "seconds per step now"]
    usual: Annotated[float, "seconds per step before"]
    reason: Sentence


@dataclass(frozen=True)
class Recovered(LedgerEvent):
    """By the supervisor: when a straggler or a slow run is as fast as before again."""

    name: ClassVar[str] = "recovered"
    of: Annotated[str, "name of the event that said how it began"]


@dataclass(frozen=True)
class MemoryLow(LedgerEvent):
    """By the supervisor: when a node has less memory left than `resilience.memory_reserve`."""

    name: ClassVar[str] = "memory_low"
    rank: Annotated[int, "the largest rank there"]
    node: Annotated[str | None, "its node"]
    reason: Sentence


@dataclass(frozen=True)
class ResourceGrowth(LedgerEvent):
    """By the supervisor: when a rank's memory or open files grow so that a day uses them up."""

    name: ClassVar[str] = "growth"
    rank: RankNumber
    node: Annotated[str | None, "its node"]
    reason: Sentence


@dataclass(frozen=True)
class StorageWaited(LedgerEvent):
    """By the supervisor or any rank: when storage that failed works again.

    Waits within ten seconds of one that was told are told together, with the next.
    """

    name: ClassVar[str] = "storage_waited"
    what: Annotated[str, "the file, and what was wrong with it, at last"]
    seconds: Annotated[float, "seconds that were waited in all"]
    tries: Annotated[int, "how often it was tried"]
    rank: Annotated[int | None, "rank that has waited, null for the supervisor"] = None


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds that a phase takes, as `count` times of it showed."""

    median: float
    spread: float
    count: int


@dataclass(frozen=True)
class PhaseDurationsLearned(LedgerEvent):
    """By the supervisor: at the end of an attempt, and every ten minutes until then."""

    name: ClassVar[str] = "phase_durations"
    ranks: Annotated[int, "how many"]
    phases: Annotated[
        Mapping[str, PhaseTimes],
        "by phase the median in seconds, what the 95th percentile has above it, and the count",
    ]
