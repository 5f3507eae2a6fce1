"""Where the ranks are, which of them is slow, and whom the others wait for."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median

from kempner.insight.report.attempts import AttemptFacts
from kempner.insight.status.facts import RankPlace
from kempner.insight.words import name_or_count, name_ranks
from kempner.run.record.events.health import Recovered, StragglerFound

STANDS_OUT = 0.05
"""By how much a rank's share of time at work must exceed the others' for it to be called slow."""

ENOUGH = 10.0
"""Seconds of work below which no rank is compared with another."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks, in ascending order, in the same place."""

    ranks: tuple[int, ...]
    step: int
    phase: str
    storage: str = ""

    @property
    def name(self) -> str:
        """`rank 3`, or `ranks 0-6, 9`."""
        return name_ranks(self.ranks)

    @property
    def place(self) -> str:
        """Step and phase, in words."""
        waits = f", waiting for storage: {self.storage}" if self.storage else ""
        return f"step {self.step}, {self.phase}{waits}"


@dataclass(frozen=True)
class SlowRank:
    """The rank that works longest while the others wait for it; `node` where that is known."""

    rank: int
    node: str | None
    sentence: str


def gather(places: Iterable[RankPlace]) -> tuple[RankGroup, ...]:
    """Ranks in the same place together: thousands of them must fit on a screen."""
    together: dict[tuple[int, str, str], list[int]] = {}
    for rank in places:
        together.setdefault((rank.step, rank.phase, rank.storage), []).append(rank.rank)
    return tuple(
        RankGroup(tuple(sorted(members)), *place) for place, members in sorted(together.items())
    )


def slowest(places: Sequence[RankPlace], attempt: AttemptFacts | None) -> SlowRank | None:
    """The slowest rank, if one stands out: by what the supervisor found, or by the time that each
    rank has worked, and waited for others, since it began with its attempt.
    """
    found = None if attempt is None else _straggler(attempt)
    if found is not None:
        return SlowRank(found.rank, found.node, found.reason)
    shares = {p.rank: p.worked / (p.worked + p.waited) for p in places if p.worked >= ENOUGH}
    if len(shares) < 2:
        return None
    rank = max(shares, key=lambda number: (shares[number], -number))
    usual = median(share for number, share in shares.items() if number != rank)
    if shares[rank] - usual < STANDS_OUT:
        return None
    sentence = f"rank {rank} works {shares[rank]:.0%} of the time, the others {usual:.0%}"
    return SlowRank(rank, None, sentence)


def _straggler(attempt: AttemptFacts) -> StragglerFound | None:
    """The rank that the supervisor last named, unless it has said that it is as fast again."""
    found = None
    for entry in attempt.entries:
        match entry.event:
            case StragglerFound():
                found = entry.event
            case Recovered(of=StragglerFound.name):
                found = None
    return found


def who_waits(places: Sequence[RankPlace]) -> str:
    """What most ranks wait for others in, and for whom, while nothing moves; empty if none does."""
    waiting = [place for place in places if place.waiting]
    if not waiting:
        return ""
    ((what, many),) = Counter(place.waiting for place in waiting).most_common(1)
    told = f"{many:,} of {len(places):,} ranks wait in {what}"
    front = max(place.step for place in places)
    others = [p for p in places if p.waiting != what or p.step < front]
    if not others or len(others) == len(places):
        return told
    behind = sorted(place.rank for place in others)
    first = min(others, key=lambda place: (place.step, place.rank))
    return f"{told} for {name_or_count(behind)} (step {first.step}, {first.phase})"
