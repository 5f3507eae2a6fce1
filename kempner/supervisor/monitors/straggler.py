"""Knows a straggler, and a run that has become slow, from what the ranks report of their steps.

A straggler is a rank whose own work per step takes longer than that of the others: they wait for
it. If all of them work longer, the run is slow, and no rank is a straggler.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Generic, TypeAlias, TypeVar

from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Phase, Report
from kempner.run.record.events import SlowDownFound, StragglerFound
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import Recovery, SlowDown, Straggler

SPAN = 15.0
"""Seconds that are looked at together; what shows in two spans in a row is no passing thing."""

STEPS = 2
"""Steps that a span has at least, if they are long."""

REMEMBERED = 240
"""Spans that count as history: the last hour, if steps are short."""

_STEPPING = (Phase.STEP, Phase.EVAL, Phase.SAVE)

_Found: TypeAlias = Straggler | SlowDown | Recovery

T = TypeVar("T")


@dataclass(frozen=True)
class Effort:
    """A rank's seconds per step: its own work, and all of them with the wait for others."""

    worked: float
    step: float


def efforts(before: Mapping[int, Report], now: Mapping[int, Report]) -> dict[int, Effort]:
    """What each rank's steps between two reports took, by the rank's own clock."""
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
    """Tells a state that lasts from one that shows once: it takes two looks in a row."""

    def __init__(self) -> None:
        self._last: T | None = None
        self.state: T | None = None

    def changes_to(self, seen: T | None) -> bool:
        """Whether another state lasts now, `None` included; `state` has it then."""
        lasts = seen == self._last
        self._last = seen
        if not lasts or seen == self.state:
            return False
        self.state = seen
        return True


class StragglerMonitor:
    """Follows the steps of one attempt; `usual` is the seconds that one took before, if known."""

    def __init__(self, section: ResilienceSection, usual: float | None) -> None:
        self._section, self._usual = section, usual
        self._since = 0.0
        self._before: Mapping[int, Report] = {}
        self._history: deque[float] = deque(maxlen=REMEMBERED)
        self._straggler: Streak[int] = Streak()
        self._slow: Streak[bool] = Streak()

    def check(self, snapshot: Snapshot) -> Sequence[_Found]:
        """What is new: a straggler or a slow-down is told once, and again when it is over."""
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
        """Compare with history, of which a slow time is no part."""
        usual = median(self._history) if self._history else self._usual
        if usual is not None and step > self._section.slowdown_factor * usual:
            return SlowDown(step, usual)
        self._history.append(step)
        return None
