"""What every monitor looks at, and how it is asked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol, Self

from kempner.run.control.protocol import Phase, Report, Usage
from kempner.run.output.logs import logger
from kempner.supervisor.control.events import Connected, LastReport
from kempner.supervisor.monitors.findings import Finding
from kempner.supervisor.monitors.phase_durations import PhaseDurations

SILENT = 7.5
"""Seconds without a report after which a rank is not merely waiting: they come once a second, and
where they go by file, within seven."""


@dataclass(frozen=True)
class RankConditions:
    """Circumstances that are not the ranks' fault.

    `woke_at` is when the supervisor last went on after it was suspended: what it read then had
    waited, and tells nothing about how long anything took before. `unstarted` says that the
    launcher still waits for a process that can start the ranks.
    """

    woke_at: float = -inf
    unstarted: bool = False


_TRAINING = frozenset({Phase.STEP, Phase.EVAL, Phase.SAVE})


@dataclass(frozen=True)
class Snapshot:
    """What is known of an attempt of `size` ranks at one moment; whatever is by rank may lack some.

    `now` is in seconds of a clock that began with the attempt and stands still while suspended.
    """

    now: float
    size: int
    reports: Mapping[int, Report] = field(default_factory=dict)
    """The newest of each rank."""
    silent: frozenset[int] = frozenset()
    """Ranks whose newest report is more than `SILENT` seconds old."""
    usage: Mapping[int, Usage] = field(default_factory=dict)
    joined: Mapping[int, Connected] = field(default_factory=dict)
    """Where each rank runs."""
    usual: PhaseDurations = field(default_factory=dict)
    """How long each phase takes in this run, as far as it is known."""
    around: RankConditions = RankConditions()

    @classmethod
    def of(
        cls,
        now: float,
        size: int,
        last_reports: Mapping[int, LastReport],
        clock: float,
        usual: PhaseDurations,
        usage: Mapping[int, Usage] | None = None,
        joined: Mapping[int, Connected] | None = None,
        around: RankConditions = RankConditions(),
    ) -> Self:
        """Of reports that are dated by another clock, on which it is `clock` seconds."""
        return cls(
            now,
            size,
            {rank: last.report for rank, last in last_reports.items()},
            frozenset(rank for rank, last in last_reports.items() if clock - last.at > SILENT),
            usage or {},
            joined or {},
            usual,
            around,
        )

    @property
    def trains(self) -> bool:
        """Whether all ranks have begun with their steps."""
        begun = [report for report in self.reports.values() if report.phase in _TRAINING]
        return len(begun) == self.size


class Monitor(Protocol):
    """Judges snapshots of one attempt. It has a memory of its own, and acts on nothing else."""

    def check(self, snapshot: Snapshot) -> Sequence[Finding]:
        """Take a look at the newest snapshot; what there is to say about it."""


class Monitors:
    """Several monitors that look at the same."""

    def __init__(self, *monitors: Monitor) -> None:
        self._monitors = monitors

    def check(self, snapshot: Snapshot) -> Sequence[Finding]:
        """What each of them finds, in their order."""
        return [finding for monitor in self._monitors for finding in monitor.check(snapshot)]


class Adviser:
    """Asks a monitor whose findings are only logged: if it fails, that is logged, and it is not
    asked again.

    An error in a monitor that only informs must not end a run.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor: Monitor | None = monitor

    def check(self, snapshot: Snapshot) -> Sequence[Finding]:
        """What the monitor finds."""
        if self._monitor is None:
            return ()
        try:
            return self._monitor.check(snapshot)
        except Exception:  # noqa: BLE001 - whatever it is, the run is worth more
            name = type(self._monitor).__name__
            logger().error(f"{name} has failed, and is not asked again", exc_info=True)
            self._monitor = None
            return ()
