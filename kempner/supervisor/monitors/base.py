"""Input and findings of the monitors, statistics of phase durations, and how findings are
reported."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from math import inf
from typing import Protocol, Self, TypeAlias

from kempner.probe.activity import Stillness
from kempner.run.control.protocol import Connected, Phase, Report, Usage
from kempner.run.output.logs import logger
from kempner.run.process.threads import AwakeClock
from kempner.run.record.events import (
    HangFound,
    JobHandedBack,
    MemoryLow,
    NodeSuspected,
    PhaseDurationsLearned,
    PhaseTimes,
    Recovered,
    ResourceGrowth,
    SlowDownFound,
    StragglerFound,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.save_times import REMEMBERED, Durations, SaveSeconds, nearest_rank
from kempner.supervisor.control.program_reports import LastReport


@dataclass(frozen=True)
class DurationStats:
    """Statistics of `count` measured durations, in seconds; `spread` is the 95th percentile minus
    the median."""

    median: float
    spread: float
    count: int

    @property
    def long(self) -> float:
        """The 95th percentile in seconds."""
        return self.median + self.spread

    @classmethod
    def of(cls, seconds: Collection[float]) -> Self | None:
        median, long = nearest_rank(seconds, 0.5), nearest_rank(seconds, 0.95)
        if median is None or long is None:
            return None
        return cls(round(median, 3), round(long - median, 3), len(seconds))


PhaseDurations: TypeAlias = Mapping[Phase, DurationStats]
"""Durations by phase; for STEP, the time between two steps."""


def to_event(phase_durations: PhaseDurations, ranks: int) -> PhaseDurationsLearned:
    return PhaseDurationsLearned(
        ranks, {phase: PhaseTimes(**asdict(usual)) for phase, usual in phase_durations.items()}
    )


def learned(history: RunHistory, ranks: int) -> dict[Phase, DurationStats]:
    """The newest phase durations in a run's history with the same number of ranks.

    Of starts, the longest: ranks that are forked start at once, and the next job imports anew."""
    ours = [e.phases for e in history.events(PhaseDurationsLearned) if e.ranks == ranks]
    if not ours:
        return {}
    newest = {phase: ours[-1][phase] for phase in Phase if phase in ours[-1]}
    starts = [each[Phase.START] for each in ours if Phase.START in each]
    if starts:
        newest[Phase.START] = max(starts, key=lambda start: start.median + start.spread)
    return {phase: DurationStats(**asdict(times)) for phase, times in newest.items()}


def longer(some: PhaseDurations, others: PhaseDurations) -> dict[Phase, DurationStats]:
    """Both merged; of two statistics of the same phase, the one with the larger 95th percentile."""
    together = dict(others)
    for phase, usual in some.items():
        other = together.get(phase, usual)
        together[phase] = max(usual, other, key=lambda each: each.long)
    return together


@dataclass(frozen=True)
class Hang:
    """No rank has made progress for `still` seconds, in `phase` (of several the one with the
    longest limit).

    `laggard` is the rank that the others wait for, if known. `deadlock` identifies the place of a
    deadlock: it is equal for the same mistake in a program. `silent`: the program does not
    report."""

    sentence: str
    laggard: int | None
    phase: Phase
    still: float
    deadlock: str = ""
    silent: bool = False


@dataclass(frozen=True)
class Straggler:
    """A rank that works `worked` seconds per step, where the median of the others is `usual`;
    `lost` (0 to 1) is the share of each step that the others wait for it."""

    rank: int
    worked: float
    usual: float
    lost: float

    @property
    def sentence(self) -> str:
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
        return (
            f"a step takes {self.step:.3g} s, {self.step / self.usual:.1f} times as long as the "
            f"{self.usual:.3g} s that are usual for this run"
        )


@dataclass(frozen=True)
class Recovery:
    """The end of a straggler or slow-down; `of` is the event of its beginning."""

    of: type[StragglerFound] | type[SlowDownFound]


@dataclass(frozen=True)
class ResourceTrouble:
    """Little memory is left on the node of `rank`, the largest there, or the memory or open files
    of `rank` grow steadily. `of` is the event that says which, `reason` a sentence."""

    of: type[MemoryLow] | type[ResourceGrowth]
    rank: int
    reason: str


@dataclass(frozen=True)
class PhasesLearned:
    """Phase durations of this attempt, recorded in case the supervisor dies."""

    phases: PhaseDurations


@dataclass(frozen=True)
class LongWork:
    """A rank of a user's own program has been at work for `seconds` of at most `limit`, at `line`;
    `waiting` ranks wait for it in collectives."""

    rank: int
    line: str
    seconds: float
    limit: float
    waiting: int

    @property
    def sentence(self) -> str:
        at = f" at {self.line}" if self.line else ""
        others = f", and {self.waiting} wait" + "s" * (self.waiting == 1) if self.waiting else ""
        return (
            f"rank {self.rank} has been at work{at} for {self.seconds:.0f} s without a step"
            f"{others}: that is no hang before {self.limit:.0f} s "
            "(resilience.hang_timeout_at_work)"
        )


Remark: TypeAlias = LongWork | Straggler | SlowDown | Recovery | ResourceTrouble | PhasesLearned
"""A finding that is only reported."""

Finding: TypeAlias = Hang | Remark


SILENT = 7.5
"""Seconds without a report after which a rank is silent. Reports come once a second; those by file
within seven."""


@dataclass(frozen=True)
class RankConditions:
    """Circumstances of the ranks.

    `woke_at`: when the supervisor last resumed after it was suspended; messages read then had
    waited, and give no durations. `unstarted`: the launcher still waits for a process that can
    start the ranks. `ended`: ranks that have exited. `still`: activity of the ranks of a user's own
    program, as observed from outside."""

    woke_at: float = -inf
    unstarted: bool = False
    ended: frozenset[int] = frozenset()
    still: Mapping[int, Stillness] = field(default_factory=dict)


_TRAINING = frozenset({Phase.STEP, Phase.EVAL, Phase.SAVE})


@dataclass(frozen=True)
class Snapshot:
    """The state of an attempt of `size` ranks at one moment; mappings by rank may be incomplete.

    `now` is in seconds since the attempt began, without time spent suspended."""

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
    """Known phase durations of this run."""
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
        begun = [report for report in self.reports.values() if report.phase in _TRAINING]
        return len(begun) == self.size


class Monitor(Protocol):
    """Judges snapshots of one attempt. It keeps state of its own, and has no side effects."""

    def check(self, snapshot: Snapshot) -> Sequence[Finding]:
        """The findings in the newest snapshot."""


class Monitors:
    """Several monitors of the same attempt. Findings of `advisers` are only reported: an exception
    in one of them is logged, and that one is removed."""

    def __init__(self, *monitors: Monitor, advisers: Sequence[Monitor] = ()) -> None:
        self._monitors, self._advisers = monitors, list(advisers)

    def check(self, snapshot: Snapshot) -> Sequence[Finding]:
        found = [finding for monitor in self._monitors for finding in monitor.check(snapshot)]
        for monitor in list(self._advisers):
            try:
                found += monitor.check(snapshot)
            except Exception:  # noqa: BLE001 - an adviser must not end a run
                name = type(monitor).__name__
                logger().error(f"{name} has failed, and is not asked again", exc_info=True)
                self._advisers.remove(monitor)
        return found


class Reporter:
    """Logs and records the remarks on one attempt. With `straggler_is_suspect` the node of a
    straggler is marked as suspect."""

    def __init__(self, attempt: int, ledger: Ledger, straggler_is_suspect: bool) -> None:
        self._record = partial(ledger.record, attempt=attempt)
        self._straggler_is_suspect = straggler_is_suspect

    def report(self, finding: Remark, snapshot: Snapshot) -> None:
        match finding:
            case Straggler():
                self._tell_of_straggler(finding, snapshot.joined)
            case LongWork():
                logger().warning(finding.sentence)
            case SlowDown():
                logger().warning(finding.sentence)
                self._record(SlowDownFound(reason=finding.sentence, **asdict(finding)))
            case Recovery():
                self._record(Recovered(of=finding.of.name))
            case ResourceTrouble(event, rank, reason):
                node = _node(rank, snapshot.joined)
                logger().warning(f"rank {rank} on {node}: {reason}")
                self._record(event(rank, node, reason))
            case PhasesLearned():
                self._record(to_event(finding.phases, snapshot.size))

    def _tell_of_straggler(self, straggler: Straggler, joined: Mapping[int, Connected]) -> None:
        node = _node(straggler.rank, joined)
        reason = f"rank {straggler.rank}{f' on {node}' if node else ''} {straggler.sentence}"
        logger().warning(reason)
        self._record(StragglerFound(node=node, reason=reason, **asdict(straggler)))
        if self._straggler_is_suspect and node is not None:
            self._record(NodeSuspected(node, reason))


def _node(rank: int, joined: Mapping[int, Connected]) -> str | None:
    return joined[rank].host if rank in joined else None


STEPS_REMEMBERED = 100
"""Steps whose durations are kept."""

_TO_THE_FIRST_STEP = (Phase.START, Phase.RENDEZVOUS, Phase.LOAD, Phase.COMPILE)
"""Phases that every attempt goes through, in this order."""

_NOT_LEARNED = (Phase.SAVE, Phase.EXIT)
"""Phases whose durations are not learned from reports: training waits for a save only if the next
one is due, or if it is the last. Commits give the durations of saves."""

SETTLES = 2.0
"""Seconds after a suspension of the supervisor in which it reads messages that have waited."""

ENOUGH = 20
"""Steps after which step durations of earlier attempts no longer count."""

RECORD_EVERY = 600.0
"""Seconds between two records of the phase durations."""


class PhaseStats:
    """Learns the seconds between steps and those of other phases.

    They are those of the rank that is ahead, to the resolution of its reports: a phase of less than
    a second may not be seen; one on the way to the first step took at most the time between the
    phases seen before and after it. Commits and evaluations report their durations. Time in which a
    rank waited for storage is not learned. `before` has the durations of earlier attempts; phases
    in `unlike` are not learned, since they are not typical of later attempts."""

    def __init__(
        self, before: PhaseDurations | None = None, unlike: Collection[Phase] = ()
    ) -> None:
        self._before, self._unlike = before or {}, unlike
        self._seen: dict[Phase, deque[float]] = {}
        self._phase, self._step, self._since = Phase.START, 0, 0.0
        self._begun = self._disturbed = False
        self._recorded_at = 0.0
        self._first_steps: float | None = None
        """Seconds of the first steps and of phases that may have come before them."""

    def check(self, snapshot: Snapshot) -> Sequence[PhasesLearned]:
        self._follow(snapshot)
        if snapshot.now - self._recorded_at <= RECORD_EVERY:
            return ()
        self._recorded_at = snapshot.now
        return self.findings()

    def findings(self) -> Sequence[PhasesLearned]:
        learned = self.learned()
        return (PhasesLearned(learned),) if learned else ()

    def _follow(self, snapshot: Snapshot) -> None:
        now = snapshot.now
        newest = max(snapshot.reports.values(), key=lambda report: report.step, default=None)
        if newest is None:
            return
        waiting = any(report.storage for report in snapshot.reports.values())
        self._disturbed = self._disturbed or waiting
        step, phase, took = newest.step, newest.phase, now - self._since
        if (step, phase) == (self._step, self._phase):
            return
        if self._disturbed:
            self._disturbed = waiting
        elif snapshot.around.woke_at + SETTLES < self._since:
            self._learn(step, phase, took)
        self._phase, self._step, self._since = phase, step, now
        self._begun = self._begun or phase not in _TO_THE_FIRST_STEP

    def _learn(self, step: int, phase: Phase, took: float) -> None:
        made = step - self._step
        if phase is not self._phase and self._phase not in (Phase.STEP, *_NOT_LEARNED):
            way, before = (*_TO_THE_FIRST_STEP, phase), self._phase
            over = (before,) if self._begun else way[way.index(before) : way.index(phase)]
            for passed in over:
                self.took(passed, took)
        if phase is Phase.STEP and self._phase in (Phase.LOAD, Phase.COMPILE):
            self._first_steps = took
        if phase is Phase.STEP and self._phase is Phase.STEP and made > 0:
            self.took(Phase.STEP, took / made, min(made, STEPS_REMEMBERED))
        elif phase is Phase.STEP and self._phase is Phase.COMPILE and made > 1:
            self.took(Phase.STEP, took / made)  # at most: the first step is in it

    def took(self, phase: Phase, seconds: float, times: int = 1) -> None:
        if phase not in self._unlike:
            self._seen.setdefault(phase, deque(maxlen=STEPS_REMEMBERED)).extend([seconds] * times)

    def note_false_hang(self, phase: Phase, seconds: float) -> None:
        """Learn the duration of a standstill that was ended as a hang and may have been none, so
        that the next attempt is not ended for the same reason. Steps have enough measurements."""
        if phase is not Phase.STEP:
            self.took(phase, seconds)

    def quantile(self, fraction: float) -> float | None:
        """The quantile of the last steps' seconds at `fraction` (0 to 1); None before any step."""
        return nearest_rank(self._seen.get(Phase.STEP, ()), fraction)

    def learned(self) -> dict[Phase, DurationStats]:
        """The durations of this attempt, or where it has none, of earlier ones."""
        return {**self._before, **self._own()}

    def usual(self) -> dict[Phase, DurationStats]:
        """The durations to expect in this attempt: the longest seen where this one has too few
        measurements."""
        own = self._own()
        unknown = Phase.STEP not in own and Phase.STEP not in self._before
        if unknown and self._first_steps is not None:
            own[Phase.STEP] = DurationStats(self._first_steps, 0.0, 1)  # at most
        if Phase.STEP in own and own[Phase.STEP].count >= ENOUGH:
            return longer(own, {p: u for p, u in self._before.items() if p is not Phase.STEP})
        return longer(own, self._before)

    def _own(self) -> dict[Phase, DurationStats]:
        summed = {phase: DurationStats.of(seconds) for phase, seconds in self._seen.items()}
        return {phase: usual for phase, usual in summed.items() if usual is not None}


class RunTimes:
    """The durations of one attempt, which begins now, and of earlier ones."""

    def __init__(
        self,
        phases: PhaseStats | None = None,
        saves: Durations | None = None,
        leaves: Sequence[float] = (),
        hung: Mapping[int, float] | None = None,
    ) -> None:
        self.clock = AwakeClock()
        self.now = self.clock.now
        """Seconds since the attempt began, without those spent suspended."""
        self.phases, self.saves = phases or PhaseStats(), saves or Durations()
        self.leaves = leaves
        """Measured seconds from the last rank's exit until the job was back in the queue."""
        self.hung = hung or {}
        """See `hung_at_work`."""
        self._left_at: float | None = None

    @classmethod
    def from_history(cls, past: RunHistory, size: int) -> Self:
        # A start without a checkpoint says nothing about how long it takes to load one.
        unlike = () if past.last_step else (Phase.LOAD,)
        leaves = [event.seconds for event in past.events(JobHandedBack)][-REMEMBERED:]
        phases = PhaseStats(learned(past, size), unlike)
        return cls(phases, past.durations, leaves, hung_at_work(past))

    def ranks_left(self) -> None:
        """Note the time of the last rank's exit; only the first call counts."""
        if self._left_at is None:
            self._left_at = time.monotonic()

    def seconds_since_left(self) -> float:
        """Seconds since the last rank's exit, 0 before that. `clock` advances only when it is
        read."""
        return 0.0 if self._left_at is None else time.monotonic() - self._left_at

    def saved(self, save: SaveSeconds) -> bool:
        """Learn a save's duration; False if it does not count, because the job was suspended in
        it."""
        if self.clock.stood_still(save.total):
            return False
        self.saves = self.saves.with_another(save)
        self.phases.took(Phase.SAVE, save.total)
        return True

    def evaluated(self, seconds: float) -> None:
        """Learn an evaluation's duration."""
        if not self.clock.stood_still(seconds):
            self.phases.took(Phase.EVAL, seconds)


def hung_at_work(past: RunHistory) -> dict[int, float]:
    """The longest standstill in seconds that was ended as a hang while a rank may have been at
    work, by last completed step."""
    longest: dict[int, float] = {}
    for hang in past.events(HangFound):
        if (stands := hang.own_program) is not None and stands.busy is not None:
            longest[stands.step] = max(longest.get(stands.step, 0.0), hang.seconds or 0.0)
    return longest
