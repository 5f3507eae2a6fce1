"""Finds deadlocks between ranks.

A rank in a collective waits for each member of its group that has not entered the same one: the
same sequence number in the group, and the same operation. A member that is in another operation
under the same number never enters it. Ranks are deadlocked if every rank that they wait for is
deadlocked as well, or has exited: a search in the wait-for graph (Knapp 1987, Deadlock detection in
distributed databases, the AND model)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from kempner.run.control.heartbeat import Standstill
from kempner.run.process.collectives import CollectiveCall, CollectivesUnderWay
from kempner.supervisor.monitors.base import Hang, Snapshot

CONFIRMED, LEFT = 3.0, 10.0
"""Seconds for which a deadlock must last, since reports are up to two seconds apart; and where a
rank has exited, which may have sent its part before."""

MOST_NAMED = 4
"""Places, or ranges of ranks, that a sentence names at most."""

_DEADLOCK = "deadlock: "


@dataclass(frozen=True)
class RankWait:
    """The collectives that a rank waits in by its newest report, and the line of its program."""

    collectives: CollectivesUnderWay
    line: str = ""


@dataclass(frozen=True)
class Deadlock:
    """Ranks that wait in collectives that cannot end; `left` are the ranks that they wait for and
    that have exited."""

    waits: Mapping[int, RankWait]
    left: tuple[int, ...] = ()

    @property
    def sentence(self) -> str:
        """For example "deadlock: rank 3 waits in all_reduce at train.py:14"."""
        found: defaultdict[tuple[str, str], list[int]] = defaultdict(list)
        for rank, wait in sorted(self.waits.items()):
            found[(wait.collectives.under_way[0].operation, wait.line)].append(rank)
        parts = [
            f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} in {operation}"
            + (f" at {line}" if line else "")
            for (operation, line), ranks in list(found.items())[:MOST_NAMED]
        ]
        gone = f", and {named(self.left)} {_has(self.left)} ended" if self.left else ""
        return f"{_DEADLOCK}{', '.join(parts)}{gone}"

    @property
    def place(self) -> str:
        """Operations and lines without ranks: equal for the same mistake in a program."""
        waits = {(w.collectives.under_way[0].operation, w.line) for w in self.waits.values()}
        return _DEADLOCK + ", ".join(sorted(f"{what} at {line}" for what, line in waits))


def find_deadlock(waits: Mapping[int, RankWait], left: Collection[int]) -> Deadlock | None:
    """The deadlocked ranks, if any. Ranks neither in `waits` nor in `left` are at work, and may
    enter any collective."""
    stuck = {rank for rank, wait in waits.items() if wait.collectives.under_way}
    found_free = True
    while found_free:
        free = {
            rank
            for rank in stuck
            if any(
                not _never_ends(rank, one, waits, left, stuck)
                for one in waits[rank].collectives.under_way
            )
        }
        stuck -= free
        found_free = bool(free)
    if not stuck:
        return None
    members = {r for rank in stuck for one in waits[rank].collectives.under_way for r in one.ranks}
    gone = tuple(sorted(members & set(left)))
    return Deadlock({rank: waits[rank] for rank in sorted(stuck)}, gone)


def _never_ends(
    rank: int,
    collective: CollectiveCall,
    waits: Mapping[int, RankWait],
    left: Collection[int],
    stuck: Collection[int],
) -> bool:
    """Whether a member of the group will never enter a collective that `rank` is in."""
    return any(
        _never_comes(waits[other].collectives, collective, other in stuck)
        if other in waits
        else other in left
        for other in collective.ranks
        if other != rank
    )


def _never_comes(other: CollectivesUnderWay, collective: CollectiveCall, stuck: bool) -> bool:
    here = (collective.group, collective.number)
    for one in other.under_way:
        if (one.group, one.number) == here:
            return one.operation != collective.operation
    return stuck and other.begun.get(collective.group, 0) < collective.number


def named(ranks: Collection[int]) -> str:
    """Ranks for a sentence: "rank 3", "ranks 0 to 2 and 5", "ranks 0, 2, 4, 6 and 8 more"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [_span(run) for run in runs]
    if len(parts) > MOST_NAMED + 1:
        parts = [*parts[:MOST_NAMED], f"{len(ranks) - sum(map(len, runs[:MOST_NAMED]))} more"]
    words = f"{', '.join(parts[:-1])} and {parts[-1]}" if len(parts) > 1 else parts[0]
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {words}"


def _span(run: Sequence[int]) -> str:
    if len(run) == 2:
        return f"{run[0]} and {run[1]}"
    return f"{run[0]} to {run[-1]}" if len(run) > 1 else f"{run[0]}"


def is_deadlock(raised: str) -> bool:
    return raised.startswith(_DEADLOCK)


def _has(ranks: Collection[int]) -> str:
    return "has" if len(ranks) == 1 else "have"


class DeadlockDetector:
    """Finds a deadlock in the ranks' reports that lasts."""

    def __init__(self) -> None:
        self._still: Standstill[Deadlock | None] = Standstill(None, 0.0)

    def check(self, snapshot: Snapshot) -> Sequence[Hang]:
        waits = {
            rank: RankWait(report.collectives, report.line)
            for rank, report in snapshot.reports.items()
            if report.collectives.under_way
            and rank not in snapshot.silent
            and rank not in snapshot.around.ended
        }
        found = find_deadlock(waits, snapshot.around.ended) if waits else None
        self._still = self._still.seen(found, snapshot.now)
        still = self._still.seconds(snapshot.now)
        if found is None or still < (LEFT if found.left else CONFIRMED):
            return ()
        phase = snapshot.reports[min(found.waits)].phase
        laggard = found.left[0] if found.left else None
        return (Hang(found.sentence, laggard, phase, still, found.place),)
