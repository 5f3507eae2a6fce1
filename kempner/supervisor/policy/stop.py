"""Pure functions: when an attempt has to stop, from the state of its Slurm job; and an attempt's
state machine, with its deadlines."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from typing import Final

from kempner.cluster.slurm.job import JobEvent, JobState, classify
from kempner.run.process.exit_codes import StopReason
from kempner.run.process.signals import ReceivedSignal
from kempner.run.record.events import StopRequested
from kempner.run.record.save_times import Durations, nearest_rank
from kempner.supervisor.policy.outcome import ReportedLoop

UNMEASURED_LEAD = 120.0
"""Seconds before the job's end at which to stop, while no saves have been measured."""

UNMEASURED_SHARE = 0.25
"""The largest share of the job's time limit used for that: a short job would otherwise be stopped
before it has begun."""

LARGEST_SHARE = 0.5
"""The largest share of the job's time limit that is ever reserved: otherwise, after one save that
took very long, every job would stop as it begins, and no other save would be measured."""

SLACK = 10.0
"""Seconds that a stop gets beyond the measured times, for the supervisor's polling and the ranks'
shutdown."""

EXIT_MARGIN = 15.0
"""The least seconds before the job's end by which every rank must have exited or is killed. After
that srun ends and the job is requeued, which Slurm refuses from KillWait after its end on."""

MARGIN_FACTOR = 2.0
"""The margin is this factor times what the exit and the requeue took in earlier attempts."""

MARGIN_SHARE = 0.1
"""The largest share of the job's time limit used for the margin."""

SHORTEST_KILL = 2.0
"""The least seconds to wait for a rank that was killed."""

LONGEST_WARNING = 3600.0
"""A signal in these last seconds of a job is taken for the warning of `--signal`, an earlier one
for a user's: Slurm does not tell them apart."""

SOONER = 1.0
"""Seconds by which a deadline must move closer for the ranks to be told again."""

PREEMPTED = "preempted by a job of higher priority"


@dataclass(frozen=True)
class StopOrder:
    reason: StopReason
    sentence: str
    seconds_left: float


@dataclass(frozen=True)
class StandingStop:
    """The stop that the ranks were told: why, and `by` when, in seconds of the supervisor's
    clock."""

    reason: StopReason
    sentence: str
    by: float


def renew(standing: StandingStop | None, order: StopOrder, now: float) -> StandingStop | None:
    """What to tell the ranks after another order; None if it is nothing new.

    They are told again if less time is left than they know, or if the reason is more specific: a
    signal comes first, and Slurm explains it a moment later. The earliest deadline holds, since the
    supervisor then kills the ranks that are left."""
    by = now + order.seconds_left
    if standing is None:
        return StandingStop(order.reason, order.sentence, by)
    known = standing if standing.reason > order.reason else order
    if known.reason is standing.reason and by > standing.by - SOONER:
        return None
    return StandingStop(known.reason, known.sentence, min(by, standing.by))


def decide_stop(
    first: JobState,
    now: JobState,
    kill_wait: float,
    left: float | None,
    *,
    lead: float,
    margin: float,
    warned: bool,
) -> StopOrder | None:
    """The order to stop, if the ranks have to; `first` is the job's state when the attempt began.

    `left` is the number of seconds until the job's end (None: no time limit), `lead` how long
    before it a stop must begin, `margin` how long before it the ranks must have exited; `warned`: a
    signal came. After a preemption's grace time, as at any end of a job, Slurm sends SIGTERM and
    waits for `kill_wait` seconds, or longer. It then requeues the job itself, or the job may not be
    requeued, so no margin is kept."""
    match classify(first, now, warned):
        case JobEvent.NOTHING:
            if left is not None and left <= lead:
                sentence = f"{left:.0f} s are left of the job's time"
                return StopOrder(StopReason.DEADLINE, sentence, max(0.0, left - margin))
            return None
        case JobEvent.TIME_LIMIT:
            return None if left is None else _decide_on_warning(left, margin)
        case JobEvent.PREEMPTION:
            grace = 0.0 if left is None else max(0.0, left)
            return StopOrder(StopReason.PREEMPTION, PREEMPTED, grace + kill_wait)
        case event:
            preempted = now.times.preempt is not None
            reason = StopReason.PREEMPTION if preempted else _REASONS[event]
            return StopOrder(reason, event.value, kill_wait)


_REASONS = {
    JobEvent.TIME_LIMIT_REACHED: StopReason.TIME_LIMIT,
    JobEvent.REQUEUE: StopReason.REQUEUE,
    JobEvent.CANCEL: StopReason.CANCEL,
    JobEvent.ENDED: StopReason.SIGNAL,  # Slurm signals a job's processes without saying why
}


def _decide_on_warning(left: float, margin: float) -> StopOrder:
    seconds_left = max(0.0, left - margin)
    if left > LONGEST_WARNING:
        sentence = f"a signal came {left / 3600:.1f} h before the end of the job's time"
        return StopOrder(StopReason.OPERATOR, sentence, seconds_left)
    return StopOrder(StopReason.TIME_LIMIT, "Slurm sent a warning", seconds_left)


def exit_margin(measured: Collection[float], limit: float | None) -> float:
    """Seconds before the job's end by which every rank must have exited.

    `measured` are the seconds from the exit of the last rank to the requeue in earlier attempts;
    `limit` is the job's time limit in seconds, None without one."""
    long = nearest_rank(measured, 0.95)
    margin = EXIT_MARGIN if long is None else max(EXIT_MARGIN, MARGIN_FACTOR * long)
    return margin if limit is None else min(margin, MARGIN_SHARE * limit)


def time_to_abandon(left: float | None, patience: float) -> float:
    """Seconds to wait for a killed rank, with `left` seconds until the job's end: at most half of
    them, so that the job can be requeued even if a rank is stuck in the kernel."""
    return patience if left is None else min(patience, max(SHORTEST_KILL, left / 2))


def stop_lead(
    durations: Durations, longest_gap: float | None, limit: float | None, margin: float
) -> float:
    """Seconds before the job's end at which a stop must begin: two gaps between votes (one until
    the ranks agree, one for the step they are in), two saves (one under way, and the last one),
    slack, and the `margin`.

    `longest_gap` is the 95th percentile of the seconds between two votes; `limit` is the job's time
    limit in seconds, None without one."""
    save = durations.quantile(0.95)
    if save is None or longest_gap is None:
        return UNMEASURED_LEAD if limit is None else min(UNMEASURED_LEAD, UNMEASURED_SHARE * limit)
    lead = 2 * longest_gap + 2 * save + SLACK + margin
    return lead if limit is None else min(lead, LARGEST_SHARE * limit)


def warn_of_slow_saves(
    durations: Durations, preemption: float | None, lead: float, limit: float | None
) -> str | None:
    """A warning if saves take longer than a preemption or the job's time leaves for them.

    In seconds: `preemption` is the time that a preemption leaves (None: no preemption), `lead` as
    from `stop_lead`, `limit` the job's time limit (None: none)."""
    save = durations.quantile(0.95)
    if save is None:
        return None
    if preemption is not None and save > preemption:
        return (
            f"a save takes up to {save:.0f} s, and a preemption leaves {preemption:.0f} s: it "
            "would cost the steps since the last checkpoint; lower checkpoint.interval, or write "
            "to faster storage (checkpoint.dir)"
        )
    if limit is not None and lead >= LARGEST_SHARE * limit and 2 * save > lead:
        return (
            f"a stop may wait for two saves of up to {save:.0f} s, and half of the job's time is "
            f"{lead:.0f} s: ask for more time (--time), or write to faster storage (checkpoint.dir)"
        )
    return None


class AttemptState(StrEnum):
    LAUNCHING = "launching"
    """The ranks are being started, and none has connected yet."""
    JOINING = "joining"
    """Some ranks have connected, but not all."""
    RUNNING = "running"
    """All ranks have connected."""
    STOPPING = "stopping"
    """The ranks were asked to commit and exit."""
    FAILING = "failing"
    """A rank failed; the others have a moment to exit, whether asked to stop or not."""
    COLLECTING_EVIDENCE = "collecting evidence"
    """The ranks hang; they and their nodes report their state before they are killed."""
    KILLING = "killing"
    """Time is up; the remaining ranks are killed."""
    ABANDONED = "abandoned"
    """A rank cannot be killed: it is stuck in the kernel, or its node is gone."""
    ENDED = "ended"
    """No rank is left."""


class Trigger(StrEnum):
    RANK_JOINED = "a rank joined"
    ALL_JOINED = "all have joined"
    STOP_REQUESTED = "a stop was asked for"
    RANK_FAILED = "a rank failed"
    HANG_FOUND = "nothing moves"
    OUTSTAYED = "all have said how they end, and a process stays"
    TIME_UP = "time is up"
    ALL_ENDED = "all have ended"


class Deadline(StrEnum):
    """The deadlines of an attempt, each with what happens then."""

    RECONNECT = "reconnect"
    """A rank whose connection broke counts as lost."""
    JOIN = "join"
    """A rank that never connected counts as lost."""
    STOP = "stop"
    """The ranks that were asked to stop are killed."""
    CRASH = "crash"
    """The ranks that survived a failed one are killed."""
    EVIDENCE = "evidence"
    """The ranks that hang are killed."""
    ABANDON = "abandon"
    """The ranks that survive SIGKILL are abandoned."""


STAYS: Final = None
"""In the table: the trigger has no effect in this state."""

_S, _T, _D = AttemptState, Trigger, Deadline
_COLLECTING = AttemptState.COLLECTING_EVIDENCE

_COLUMNS = (
    _T.RANK_JOINED, _T.ALL_JOINED,
    _T.STOP_REQUESTED, _T.RANK_FAILED, _T.HANG_FOUND, _T.OUTSTAYED, _T.TIME_UP, _T.ALL_ENDED,
)  # fmt: skip

# A stop or a failure has its own deadline, so ranks that do not move then are no hang. If the hang
# was found first, neither a stop nor a failure interrupts the collection of evidence.
_ROWS: Mapping[AttemptState, tuple[AttemptState | None, ...]] = {
    _S.LAUNCHING: (_S.JOINING, _S.RUNNING, _S.STOPPING, _S.FAILING, _COLLECTING,
                   _S.KILLING, STAYS,        _S.ENDED),
    _S.JOINING:   (STAYS,      _S.RUNNING, _S.STOPPING, _S.FAILING, _COLLECTING,
                   _S.KILLING, STAYS,        _S.ENDED),
    _S.RUNNING:   (STAYS,      STAYS,      _S.STOPPING, _S.FAILING, _COLLECTING,
                   _S.KILLING, STAYS,        _S.ENDED),
    _S.STOPPING:  (STAYS,      STAYS,      STAYS,       _S.FAILING, STAYS,
                   _S.KILLING, _S.KILLING,   _S.ENDED),
    _S.FAILING:   (STAYS,      STAYS,      STAYS,       STAYS,      STAYS,
                   _S.KILLING, _S.KILLING,   _S.ENDED),
    _COLLECTING:  (STAYS,      STAYS,      STAYS,       STAYS,      STAYS,
                   _S.KILLING, _S.KILLING,   _S.ENDED),
    _S.KILLING:   (STAYS,      STAYS,      STAYS,       STAYS,      STAYS,
                   STAYS,      _S.ABANDONED, _S.ENDED),
    _S.ABANDONED: (STAYS,) * 8,
    _S.ENDED:     (STAYS,) * 8,
}  # fmt: skip

TRANSITIONS: Mapping[tuple[AttemptState, Trigger], AttemptState | None] = {
    (state, trigger): to
    for state, row in _ROWS.items()
    for trigger, to in zip(_COLUMNS, row, strict=True)
}
"""The next state for every state and trigger."""

DEADLINES: Mapping[AttemptState, frozenset[Deadline]] = {
    _S.LAUNCHING: frozenset({_D.RECONNECT}),
    _S.JOINING: frozenset({_D.RECONNECT, _D.JOIN}),
    _S.RUNNING: frozenset({_D.RECONNECT}),
    _S.STOPPING: frozenset({_D.RECONNECT, _D.JOIN, _D.STOP}),
    _S.FAILING: frozenset({_D.RECONNECT, _D.JOIN, _D.STOP, _D.CRASH}),
    _S.COLLECTING_EVIDENCE: frozenset({_D.RECONNECT, _D.JOIN, _D.STOP, _D.CRASH, _D.EVIDENCE}),
    _S.KILLING: frozenset({_D.RECONNECT, _D.JOIN, _D.ABANDON}),
    _S.ABANDONED: frozenset(),
    _S.ENDED: frozenset(),
}
"""The deadlines that hold in each state."""

BEGINS: Mapping[Trigger, Deadline] = {
    _T.STOP_REQUESTED: _D.STOP,
    _T.RANK_FAILED: _D.CRASH,
    _T.HANG_FOUND: _D.EVIDENCE,
    _T.OUTSTAYED: _D.ABANDON,
    _T.TIME_UP: _D.ABANDON,
}
"""The triggers that start a deadline, after which ranks are killed or, at last, abandoned."""

OVER: Final = frozenset({AttemptState.ABANDONED, AttemptState.ENDED})
"""The final states."""


@dataclass(frozen=True)
class AttemptLife:
    """An attempt is in `state` since `since`, until its deadline `until`; seconds of one clock.

    `graces` has the seconds of each deadline in `BEGINS`. The earliest deadline that was started
    counts: a stop gives no more time to a rank that has to exit because of another's failure, and
    vice versa. The deadline after the kill is separate."""

    graces: Mapping[Deadline, float]
    state: AttemptState
    since: float
    until: float = inf

    def after(self, trigger: Trigger, now: float, within: float = inf) -> AttemptLife:
        """The attempt after a trigger whose deadline is at most `within` seconds away. The same
        trigger again may move the deadline closer, never further away."""
        state = TRANSITIONS[self.state, trigger] or self.state
        begun, until = BEGINS.get(trigger), self.until
        if begun in DEADLINES[state]:
            grace = min(self.graces[begun], within)
            # A rank that is killed now gets its full grace, whatever deadline was started before.
            killed_now = begun is Deadline.ABANDON and state is not self.state
            until = now + grace if killed_now else min(until, now + grace)
        since = self.since if state is self.state else now
        return replace(self, state=state, since=since, until=until)

    def holds(self, deadline: Deadline) -> bool:
        return deadline in DEADLINES[self.state]

    @property
    def over(self) -> bool:
        return self.state in OVER


@dataclass
class StopStatus:
    """What is known of a stop, and of the `loop` of a user's program.

    `standing` is what the ranks were told, None until they are asked to stop; `ranks_reason` is the
    reason that the ranks themselves gave. `unrecorded` is what is not in the ledger yet, and since
    when. `by_user`: `kempner stop` asked for it, so no signal is Slurm's warning. `signalled`: a
    rank has reported a signal."""

    signals: list[ReceivedSignal] = field(default_factory=list)
    standing: StandingStop | None = None
    ranks_reason: StopReason = StopReason.NONE
    unrecorded: tuple[StopRequested, float] | None = None
    loop: ReportedLoop = ReportedLoop.UNKNOWN
    by_user: bool = False
    signalled: bool = False

    @property
    def reason(self) -> StopReason:
        """Why the ranks were asked to stop, or stop by themselves; NONE if they were not asked."""
        if self.standing is None:
            return StopReason.NONE
        if self.standing.reason is StopReason.PEER_STOPPED and self.ranks_reason:
            return self.ranks_reason  # the ranks know why that peer was asked
        return max(self.standing.reason, self.ranks_reason)
