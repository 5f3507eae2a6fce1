"""Which ranks of an attempt have joined, which connections are broken, and how each rank ended.

Writes each rank's last known step and phase to disk, for `kempner status`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from kempner.run.control.heartbeat import describe_places
from kempner.run.control.protocol import Connected, Disconnected
from kempner.run.output.logs import warn
from kempner.run.output.writers import LatestContent
from kempner.run.process.exit_codes import LEFT_EARLY
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.policy.outcome import RankExit, failed, is_lost

RECONNECT = 3.0
"""Seconds within which a rank that has hung up has to be back, or it is gone: its process has
ended, or tries again after a tenth of a second. While steps are made, every rank is there: they
count from the last one."""

AWAY = 60.0
"""Seconds without a message after which a rank whose connection broke off in any other way is taken
for gone. A network that finds its ways anew (spanning tree, a switch that starts) is away for half
a minute, both kernels give the connection up within `UNACKNOWLEDGED`, and a try to connect takes
seconds; a restart would cost more."""

JOIN = 120.0
"""Seconds after another has joined within which a rank joins, or it is gone: srun does not tell
when one of its tasks has ended. A rank joins before it imports torch."""


class _BrokenConnection(NamedTuple):
    """When a connection broke off, and whether the rank's side closed it."""

    at: float
    hung_up: bool


class RankRoster:
    """The `size` ranks of one attempt. Times are seconds of the attempt's clock.

    Ranks that do not have to report (`must_report`) need not join either.
    """

    def __init__(self, size: int, must_report: bool = True) -> None:
        self.size, self.must_report = size, must_report
        self.joined: dict[int, Connected] = {}
        self.stuck: dict[int, Connected] = {}
        """Where ranks are that could not be killed."""
        self._joined_at = 0.0
        self._broken: dict[int, _BrokenConnection] = {}
        self._heard: dict[int, tuple[float, float]] = {}
        """The date of the newest word of each rank, and when it was seen."""
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

    @property
    def first_ended_at(self) -> float | None:
        """When the first rank ended; None if none has."""
        return min((at for at, _ in self._ends.values()), default=None)

    def connected(self, there: Connected, now: float) -> None:
        """A rank has connected, for the first time or again."""
        self._broken.pop(there.rank, None)
        self._heard[there.rank] = (0.0, now)
        self.joined[there.rank] = there
        self._joined_at = now

    def disconnected(self, gone: Disconnected, now: float) -> None:
        """A rank's connection broke off; of one that has ended that says nothing new."""
        if gone.rank not in self._ends:
            self._broken[gone.rank] = _BrokenConnection(now, gone.hung_up)

    def ended(self, end: RankExit, now: float) -> bool:
        """A rank has ended; False if that was known.

        The first word counts: a rank's own says more than its exit status, which comes later.
        """
        if end.rank in self._ends:
            return False
        self._ended_at, self.any_failed = now, self.any_failed or failed(end)
        broken = self._broken.pop(end.rank, None)
        self._ends[end.rank] = (now if broken is None else broken.at, end)
        return True

    def left_early(self, end: RankExit) -> bool:
        """Whether a rank that was stopped had not begun to train: then no rank can have begun."""
        return self.must_report and (
            end.rank not in self.joined or end.sentence.startswith(LEFT_EARLY)
        )

    def heard(self, last_reports: Mapping[int, LastReport], now: float) -> None:
        """These are the newest words of the ranks, over whatever way they came."""
        step = max((last.report.step for last in last_reports.values()), default=0)
        if step > self._reached:
            self._reached, self._reached_at = step, now
        for rank, last in last_reports.items():
            if self._heard.get(rank, (0.0, now))[0] != last.at:
                self._heard[rank] = (last.at, now)

    def cut_off(self, now: float) -> list[RankExit]:
        """The ends of ranks whose connection broke off too long ago."""
        lost = []
        for rank, broken in self._broken.items():
            if now - max(broken.at, self._reached_at) <= RECONNECT:
                continue
            _, heard_at = self._heard.get(rank, (0.0, broken.at))
            # After a failure, of which this may be the cause, there is nothing to save.
            at_once = broken.hung_up or self.any_failed
            if at_once or now - max(heard_at, self._reached_at) > AWAY:
                lost.append(RankExit(rank, None))
        return lost

    def never_joined(self, now: float) -> list[RankExit]:
        """The ends of ranks that have not joined, long after the others."""
        if not (self.must_report and self.joined and now - self._joined_at > JOIN):
            return []
        missing = sorted(set(range(self.size)) - self.joined.keys())
        return [RankExit(rank, None, sentence="it has never joined") for rank in missing]

    def not_ended(self) -> list[int]:
        """The ranks of whose end nothing is known."""
        return [rank for rank in range(self.size) if rank not in self._ends]

    def survivors(self) -> dict[int, Connected]:
        """Of those the ones whose connection holds: the kernel ends it with the process."""
        there = (rank for rank in self.not_ended() if rank not in self._broken)
        return {rank: self.joined[rank] for rank in there if rank in self.joined}

    def ended_for(self, now: float) -> float | None:
        """Seconds since the last of all ranks has ended; None if some have not."""
        return now - self._ended_at if len(self._ends) == self.size else None

    def host_of(self, rank: int | None) -> str:
        """Where a rank ran, or nothing if it never joined."""
        return self.joined[rank].host if rank in self.joined else ""

    @property
    def stuck_hosts(self) -> set[str]:
        """Where ranks could not be killed."""
        return {there.host for there in self.stuck.values()}

    def stuck_pids(self) -> dict[str, list[int]]:
        """The process ids of the stuck ranks, by host."""
        where = self.stuck.values()
        return {host: [t.pid for t in where if t.host == host] for host in self.stuck_hosts}

    def lost_hosts(self) -> list[str]:
        """Hosts of ranks whose end was not seen: the machines may be gone, too."""
        lost = (end.rank for end in self.ends if is_lost(end))
        return sorted({self.joined[rank].host for rank in lost if rank in self.joined})


EVERY = 2.0
"""Seconds between two versions of the file."""


class RankStatusFile:
    """Keeps the file up to date. It is worth having, but never worth the run."""

    def __init__(self, path: Path) -> None:
        self._file = LatestContent(path, warn)
        self._written: Mapping[int, LastReport] = {}
        self._due_at = 0.0

    def update(self, seen: Mapping[int, LastReport], *, now: bool = False) -> None:
        """Write what has changed, if it is time, or `now`."""
        if seen == self._written or (time.monotonic() < self._due_at and not now):
            return
        self._due_at = time.monotonic() + EVERY
        self._file.replace(describe_places({rank: last.report for rank, last in seen.items()}))
        self._written = seen
