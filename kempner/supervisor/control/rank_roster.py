"""Who of the ranks of an attempt has joined, whose connection is broken, and how each has ended."""

from __future__ import annotations

from operator import itemgetter

from kempner.supervisor.control.events import Connected
from kempner.supervisor.policy.outcome import RankExit, failed

RECONNECT = 3.0
"""Seconds within which a rank whose connection broke off has to be back, or it is gone. One that
lives tries again after a tenth of a second. While steps are made, every rank is there: they count
from the last one."""

JOIN = 120.0
"""Seconds after another has joined within which a rank joins, or it is gone: srun does not tell
when one of its tasks has ended. A rank joins before it imports torch."""


class RankRoster:
    """The `size` ranks of one attempt. Times are seconds of the attempt's clock.

    Ranks that do not have to report (`must_report`) need not join either.
    """

    def __init__(self, size: int, must_report: bool = True) -> None:
        self.size, self.must_report = size, must_report
        self.joined: dict[int, Connected] = {}
        self._joined_at = 0.0
        self._broken_since: dict[int, float] = {}
        self._reached, self._reached_at = 0, 0.0
        self._ends: dict[int, tuple[float, RankExit]] = {}
        self._ended_at = 0.0
        self.any_failed = False
        """Whether a rank has ended as none should: the others cannot go on."""

    @property
    def all_joined(self) -> bool:
        """Whether every rank has connected, if only once."""
        return len(self.joined) == self.size

    @property
    def ends(self) -> list[RankExit]:
        """How ranks ended, in the order of the first sign of it."""
        return [end for _, end in sorted(self._ends.values(), key=itemgetter(0))]

    def connected(self, there: Connected, now: float) -> None:
        """A rank has connected, for the first time or again."""
        self._broken_since.pop(there.rank, None)
        self.joined[there.rank] = there
        self._joined_at = now

    def disconnected(self, rank: int, now: float) -> None:
        """A rank's connection broke off; of one that has ended that says nothing new."""
        if rank not in self._ends:
            self._broken_since[rank] = now

    def ended(self, end: RankExit, now: float) -> bool:
        """A rank has ended; False if that was known.

        The first word counts: a rank's own says more than its exit status, which comes later.
        """
        if end.rank in self._ends:
            return False
        self._ended_at, self.any_failed = now, self.any_failed or failed(end)
        self._ends[end.rank] = (self._broken_since.pop(end.rank, now), end)
        return True

    def reached(self, step: int, now: float) -> None:
        """The furthest rank has reported this step."""
        if step > self._reached:
            self._reached, self._reached_at = step, now

    def cut_off(self, now: float) -> list[RankExit]:
        """The ends of ranks whose connection broke off too long ago."""
        broken = self._broken_since.items()
        return [
            RankExit(rank, None)
            for rank, at in broken
            if now - max(at, self._reached_at) > RECONNECT
        ]

    def never_joined(self, now: float) -> list[RankExit]:
        """The ends of ranks that have not joined, long after the others."""
        if not (self.must_report and self.joined and now - self._joined_at > JOIN):
            return []
        missing = sorted(set(range(self.size)) - self.joined.keys())
        return [RankExit(rank, None, sentence="it has never joined") for rank in missing]

    def ended_for(self, now: float) -> float | None:
        """Seconds since the last of all ranks has ended; None if some have not."""
        return now - self._ended_at if len(self._ends) == self.size else None

    def host_of(self, rank: int | None) -> str:
        """Where a rank ran, or nothing if it never joined."""
        return self.joined[rank].host if rank in self.joined else ""

    def lost_hosts(self) -> list[str]:
        """Where ranks are gone of whose end nobody knows more: their machines may be gone, too."""
        lost = (end.rank for end in self.ends if end.status is None and not end.ended_by_us)
        return sorted({self.joined[rank].host for rank in lost if rank in self.joined})
