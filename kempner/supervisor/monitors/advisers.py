"""Findings that do not end an attempt: a straggler, a slow-down of the run, a node that runs short
of memory, steady growth of a rank; and the explanation of an out-of-memory kill.

A straggler is a rank whose own work per step takes longer than that of the others, which wait for
it. If all ranks work longer, the run is slow, and none is a straggler."""

from __future__ import annotations

import signal
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Generic, TypeAlias, TypeVar

from kempner.cluster.machine import MemoryGroup
from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Connected, Phase, Report, Usage
from kempner.run.record.events import (
    MemoryLow,
    ResourceGrowth,
    SlowDownFound,
    StragglerFound,
)
from kempner.supervisor.monitors.base import (
    Recovery,
    ResourceTrouble,
    SlowDown,
    Snapshot,
    Straggler,
)
from kempner.supervisor.monitors.hangs import is_here
from kempner.supervisor.policy.outcome import OUT_OF_MEMORY, RankExit

SPAN = 15.0
"""Seconds of a span; a state counts once two spans in a row show it."""

STEPS = 2
"""Steps that a span has at least."""

REMEMBERED = 240
"""Spans that are kept as history: an hour, if steps are short."""

_STEPPING = (Phase.STEP, Phase.EVAL, Phase.SAVE)

_Found: TypeAlias = Straggler | SlowDown | Recovery

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """A rank's seconds per step: of its own work, and in all with the wait for others."""

    worked: float
    step: float


def efforts(before: Mapping[int, Report], now: Mapping[int, Report]) -> dict[int, Effort]:
    """Seconds per step of each rank between two reports, by the rank's own clock."""
    found = {}
    for rank, report in now.items():
        steps = report.step - before[rank].step
        worked, waited = report.worked - before[rank].worked, report.waited - before[rank].waited
        found[rank] = Effort(worked / steps, (worked + waited) / steps)
    return found


def find_straggler(found: Mapping[int, Effort], share: float) -> Straggler | None:
    """The rank that costs the others at least `share` (0 to 1) of the step, if there is one."""
    if len(found) < 2:
        return None
    rank = max(found, key=lambda rank: found[rank].worked)
    usual = median(effort.worked for other, effort in found.items() if other != rank)
    worked, step = found[rank].worked, median(effort.step for effort in found.values())
    lost = min(1.0, (worked - usual) / step)
    return Straggler(rank, worked, usual, lost) if lost >= share else None


class Streak(Generic[T]):
    """Filters a state: it counts once it was seen twice in a row."""

    def __init__(self) -> None:
        self._last: T | None = None
        self.state: T | None = None

    def changes_to(self, seen: T | None) -> bool:
        """Whether `state` has changed, `None` included."""
        lasts = seen == self._last
        self._last = seen
        if not lasts or seen == self.state:
            return False
        self.state = seen
        return True


class StragglerMonitor:
    """Follows the steps of one attempt; `usual` are the seconds per step before it, if known."""

    def __init__(self, section: ResilienceSection, usual: float | None) -> None:
        self._section, self._usual = section, usual
        self._since = 0.0
        self._before: Mapping[int, Report] = {}
        self._history: deque[float] = deque(maxlen=REMEMBERED)
        self._straggler: Streak[int] = Streak()
        self._slow: Streak[bool] = Streak()

    def check(self, snapshot: Snapshot) -> Sequence[_Found]:
        """New findings: the beginning and the end of a straggler or a slow-down."""
        reports, now = snapshot.reports, snapshot.now
        stepping = all(r.phase in _STEPPING and not r.storage for r in reports.values())
        if len(reports) < snapshot.size or not stepping:
            self._before = {}
            return ()
        steps = [r.step - self._before[rank].step for rank, r in reports.items() if self._before]
        paused = snapshot.around.woke_at >= self._since  # the ranks may have been suspended as well
        if not steps or min(steps) < 0 or paused:  # a beginning, or a rollback
            self._since, self._before = now, reports
        elif now - self._since >= SPAN and min(steps) >= STEPS:
            found = efforts(self._before, reports)
            self._since, self._before = now, reports
            return self._judge(found)
        return ()

    def _judge(self, found: Mapping[int, Effort]) -> Sequence[_Found]:
        step = median(effort.step for effort in found.values())
        if step <= 0:
            return ()  # a program that says how far it is, and not how long it works
        straggler = find_straggler(found, self._section.straggler_share)
        slow = self._find_slow_down(step)
        was_late, was_slow = self._straggler.state, self._slow.state
        late = self._straggler.changes_to(straggler.rank if straggler else None)
        slower = self._slow.changes_to(True if slow else None)
        new: list[_Found] = []
        if late and straggler is not None:
            new.append(straggler)
        if slower and slow is not None:
            new.append(slow)
        if late and was_late is not None:
            new.append(Recovery(StragglerFound))
        if slower and was_slow:
            new.append(Recovery(SlowDownFound))
        return new

    def _find_slow_down(self, step: float) -> SlowDown | None:
        usual = median(self._history) if self._history else self._usual
        if usual is not None and step > self._section.slowdown_factor * usual:
            return SlowDown(step, usual)
        self._history.append(step)
        return None


GROWTH_SPAN = 300.0
"""Seconds of a span, of which the least use counts, so that peaks are no growth."""

SPANS = 6
"""Spans in a row, each with more use than the one before, that count as growth."""

HORIZON = 24 * 3600.0
"""Seconds within which growth must exhaust a resource to be reported."""


class GrowthTracker:
    def __init__(self) -> None:
        self._least: deque[float] = deque(maxlen=SPANS)
        self._span = -1

    def full_in(self, value: float, room: float, now: float) -> float | None:
        """Seconds until steady growth has used up `room`; None without growth, and until the next
        span begins. `now` is in seconds."""
        span = int(now // GROWTH_SPAN)
        if span == self._span:
            self._least[-1] = min(self._least[-1], value)
            return None
        self._span = span
        before = list(self._least)
        self._least.append(value)
        steady = all(earlier < later for earlier, later in pairwise(before))
        if len(before) < SPANS or not steady:
            return None
        return room / (before[-1] - before[0]) * GROWTH_SPAN * (SPANS - 1)


class MemoryMonitor:
    """Follows the resource use of one attempt's ranks; each trouble is reported once."""

    def __init__(self, section: ResilienceSection) -> None:
        self._reserve = section.memory_reserve
        self._growth: defaultdict[tuple[int, str], GrowthTracker] = defaultdict(GrowthTracker)
        self._short: set[str] = set()
        self._reported: set[tuple[int, str]] = set()

    def check(self, snapshot: Snapshot) -> Sequence[ResourceTrouble]:
        return [*self._shortages(snapshot), *self._growing(snapshot)]

    def _shortages(self, snapshot: Snapshot) -> list[ResourceTrouble]:
        """Nodes with less memory than the reserve, each with its largest rank."""
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
        return [ResourceTrouble(MemoryLow, rank, describe_usage(usage[rank])) for rank in new]

    def _growing(self, snapshot: Snapshot) -> Iterator[ResourceTrouble]:
        for rank, seen in snapshot.usage.items():
            for what, value, room in (
                ("memory", _size(seen), seen.memory.available),
                ("open files", seen.files, seen.files_limit - seen.files),
            ):
                seconds = self._growth[rank, what].full_in(value, room, snapshot.now)
                if seconds is None or seconds > HORIZON or (rank, what) in self._reported:
                    continue
                self._reported.add((rank, what))
                reason = (
                    f"{what} grew for {SPANS * GROWTH_SPAN / 60:.0f} minutes without pause; at "
                    f"this rate nothing is left in {seconds / 3600:.1f} h: {describe_usage(seen)}"
                )
                yield ResourceTrouble(ResourceGrowth, rank, reason)


def explain_kill(last: Usage, kills: int) -> str:
    """A sentence about the out-of-memory kill of a rank whose newest report is `last`; empty if it
    was none. `kills` is the count of such kills in its control group now."""
    if kills <= last.memory.oom_kills:
        return ""
    return (
        f"{OUT_OF_MEMORY} it (oom_kill of {last.memory.group}); when last heard, "
        f"{describe_usage(last)}. Ask for more memory, or lower train.micro_batch_size or "
        "data.num_dataloader_workers"
    )


def describe_usage(seen: Usage) -> str:
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
    """`end`, with an explanation if it was an out-of-memory kill.

    The count of such kills comes from its node's agent, from the control group if that is on this
    host, and from the other ranks on that node, which measure once more when they lose a peer."""
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
