"""Knows a node that runs short of memory, a rank that grows without end, and an out-of-memory kill.

All from the `Usage` that ranks send, without looking at anything itself.

Whether a rank that was killed fell to the kernel, because memory ran out.
"""

from __future__ import annotations

import signal
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

from kempner.cluster.machine.limits import MemoryGroup
from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Usage
from kempner.supervisor.control.events import Connected
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import Shortage, SteadyGrowth
from kempner.supervisor.monitors.process_probe import is_here
from kempner.supervisor.policy.outcome import OUT_OF_MEMORY, RankExit

SPAN = 300.0
"""Seconds of which the least use counts: what comes and goes within them is no growth."""

SPANS = 6
"""Spans in a row, each with more than the one before, that make a growth."""

HORIZON = 24 * 3600.0
"""Seconds within which growth has to use everything up to be worth a word."""


class GrowthTracker:
    """Follows one number that should stay where it is."""

    def __init__(self) -> None:
        self._least: deque[float] = deque(maxlen=SPANS)
        self._span = -1

    def full_in(self, value: float, room: float, now: float) -> float | None:
        """Seconds after which steady growth has used up the `room` that is left; None without.

        `now` is in seconds. A new answer comes with each new span only.
        """
        span = int(now // SPAN)
        if span == self._span:
            self._least[-1] = min(self._least[-1], value)
            return None
        self._span = span
        before = list(self._least)
        self._least.append(value)
        steady = all(earlier < later for earlier, later in pairwise(before))
        if len(before) < SPANS or not steady:
            return None
        return room / (before[-1] - before[0]) * SPAN * (SPANS - 1)


class MemoryMonitor:
    """Follows the ranks of one attempt; each trouble is told once."""

    def __init__(self, section: ResilienceSection) -> None:
        self._reserve = section.memory_reserve
        self._growth: dict[tuple[int, str], GrowthTracker] = {}
        self._short: set[str] = set()
        self._told: set[tuple[int, str]] = set()

    def check(self, snapshot: Snapshot) -> Sequence[Shortage | SteadyGrowth]:
        """What is new in the ranks' newest usage."""
        return [*self._shortages(snapshot), *self._growing(snapshot)]

    def _shortages(self, snapshot: Snapshot) -> list[Shortage]:
        """Nodes that have less left than the reserve, each with its largest rank."""
        largest: dict[str, int] = {}
        usage, joined = snapshot.usage, snapshot.joined
        for rank, seen in usage.items():
            host = joined[rank].host if rank in joined else ""
            if seen.memory.available < self._reserve * seen.memory.total and (
                host not in largest or _size(seen) > _size(usage[largest[host]])
            ):
                largest[host] = rank
        new = [rank for host, rank in largest.items() if host not in self._short]
        self._short = set(largest)
        return [Shortage(rank, describe_usage(usage[rank])) for rank in new]

    def _growing(self, snapshot: Snapshot) -> Iterator[SteadyGrowth]:
        for rank, seen in snapshot.usage.items():
            for what, value, room in (
                ("memory", _size(seen), seen.memory.available),
                ("open files", seen.files, seen.files_limit - seen.files),
            ):
                growth = self._growth.setdefault((rank, what), GrowthTracker())
                seconds = growth.full_in(value, room, snapshot.now)
                if seconds is None or seconds > HORIZON or (rank, what) in self._told:
                    continue
                self._told.add((rank, what))
                reason = (
                    f"{what} grew for {SPANS * SPAN / 60:.0f} minutes without pause; at this rate "
                    f"nothing is left in {seconds / 3600:.1f} h: {describe_usage(seen)}"
                )
                yield SteadyGrowth(rank, reason)


def explain_kill(last: Usage, kills: int) -> str:
    """Why a rank was killed that said `last` of itself; empty if not for want of memory.

    `kills` is the number of out-of-memory kills in its control group since.
    """
    if kills <= last.memory.oom_kills:
        return ""
    return (
        f"{OUT_OF_MEMORY} (oom_kill of {last.memory.group}); when last heard, "
        f"{describe_usage(last)}. Ask for more memory, or lower train.micro_batch_size or "
        "data.num_dataloader_workers"
    )


def describe_usage(seen: Usage) -> str:
    """The numbers, for a person to read."""
    with_children = f" and its {seen.children} processes {_gib(seen.children_rss)}"
    return (
        f"it had {_gib(seen.rss)}{with_children if seen.children else ''}, {seen.files} files were "
        f"open, and {_gib(seen.memory.available)} of {_gib(seen.memory.total)} were left"
    )


def _size(seen: Usage) -> int:
    return seen.rss + seen.children_rss


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"


def explained(
    end: RankExit, usage: Mapping[int, Usage], joined: Mapping[int, Connected]
) -> RankExit:
    """`end`, with the reason and the numbers if it was an out-of-memory kill.

    The count of such kills comes from its node's agent, from the control group where that is on
    this host, or else from the ranks that lived on beside it: they measure once more when they lose
    a peer.
    """
    last, there = usage.get(end.rank), joined.get(end.rank)
    by_force = end.status in (-signal.SIGKILL, None) and not end.ended_by_us
    if last is None or there is None or not by_force:
        return end
    beside = [rank for rank, other in joined.items() if other.host == there.host and rank in usage]
    counts = [end.oom_kills, *(usage[rank].memory.oom_kills for rank in beside)]
    if is_here(there.host) and last.memory.group:
        with suppress(OSError):  # gone with its last process: what others have seen must do
            counts.append(MemoryGroup(Path(last.memory.group)).oom_kills())
    reason = explain_kill(last, max(counts))
    return replace(end, sentence=reason) if reason else end
