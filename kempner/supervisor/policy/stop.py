"""When an attempt stops, from what Slurm says; and its life as a table: which state follows which,
and until when each may last. Pure functions, with reasons."""

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
"""Seconds before the end at which to stop, as long as nothing was measured."""

UNMEASURED_SHARE = 0.25
"""Of the job's whole time, the most that is kept free as long as nothing was measured: a short job
would otherwise be stopped before it has begun."""

LARGEST_SHARE = 0.5
"""Of the job's whole time, the most that is ever kept free: after one save that took for ever,
every job would be stopped as it begins, and no other save would be measured."""

SLACK = 10.0
"""Seconds that a stop gets beyond what it usually takes: the supervisor looks at the clock only now
and then, and the ranks take leave of each other."""

EXIT_MARGIN = 15.0
"""Least seconds before the job's end by which every rank must have left or is killed: srun then
ends, and the job goes back into the queue. After its time Slurm takes it back for KillWait only."""

MARGIN_FACTOR = 2.0
"""How many times as long as it took in earlier attempts all of that may take."""

MARGIN_SHARE = 0.1
"""Of the job's whole time, the most that is kept free for it."""
SHORTEST_KILL = 2.0
"""Seconds that a rank which was killed gets at least."""

LONGEST_WARNING = 3600.0
"""Seconds before the end of a job from which on a signal passes for the warning of `--signal`; an
earlier one was sent by hand. Slurm does not tell which it is."""

SOONER = 1.0
"""Seconds by which a deadline must have come nearer for the ranks to be told again."""

PREEMPTED = "preempted by a job of higher priority"


@dataclass(frozen=True)
class StopOrder:
    reason: StopReason
    sentence: str
    seconds_left: float


@dataclass(frozen=True)
class StandingStop:
    """What the ranks know of a stop: why, and `by` when, in seconds of the supervisor's clock."""

    reason: StopReason
    sentence: str
    by: float


def renew(standing: StandingStop | None, order: StopOrder, now: float) -> StandingStop | None:
    """What the ranks are to be told after another order; None if they know as much.

    They are told again when less time is left than was said, or the reason says more than the one
    that they know: a signal comes first, and a moment later Slurm says why. The nearest deadline
    holds, for by then the supervisor ends the ranks that are still there."""
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
    """Whether the ranks are to stop; `first` is the job as it was when the attempt began.

    `left` is the number of seconds until the end of the job, None without one, `lead` how long
    before it a stop must begin, `margin` how long before it the ranks must have left, `warned`
    whether a signal came. After a preemption's grace time, as at any end of a job, Slurm sends
    SIGTERM and waits for `kill_wait` seconds; it keeps both times or exceeds them. It then requeues
    the job itself, or the job may not be requeued: no margin is kept."""
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
    JobEvent.ENDED: StopReason.SIGNAL,  # Slurm signals what is left of a job, and does not say why
}


def _decide_on_warning(left: float, margin: float) -> StopOrder:
    seconds_left = max(0.0, left - margin)
    if left > LONGEST_WARNING:
        sentence = f"a signal came {left / 3600:.1f} h before the end of the job's time"
        return StopOrder(StopReason.OPERATOR, sentence, seconds_left)
    return StopOrder(StopReason.TIME_LIMIT, "Slurm sent a warning", seconds_left)


def exit_margin(measured: Collection[float], limit: float | None) -> float:
    """Seconds before the job's end by which every rank must have left.

    `measured` are the seconds from the exit of the last rank until the job was back in the queue,
    in earlier attempts; `limit` is the job's whole time in seconds, None without one."""
    long = nearest_rank(measured, 0.95)
    margin = EXIT_MARGIN if long is None else max(EXIT_MARGIN, MARGIN_FACTOR * long)
    return margin if limit is None else min(margin, MARGIN_SHARE * limit)


def time_to_abandon(left: float | None, patience: float) -> float:
    """Seconds to wait until a killed rank is gone, of `left` until the job's end.

    About half of them: the rest is for the requeue, even if a rank is stuck in the kernel."""
    return patience if left is None else min(patience, max(SHORTEST_KILL, left / 2))


def stop_lead(
    durations: Durations, longest_gap: float | None, limit: float | None, margin: float
) -> float:
    """Seconds before the end at which a stop must begin.

    `longest_gap` is the 95th percentile of the seconds between two votes: one passes until the
    ranks agree, and the step that they are in takes another. A save may be under way, and the last
    one follows it; then comes the `margin`. `limit` is the job's whole time in seconds, None
    without one."""
    save = durations.quantile(0.95)
    if save is None or longest_gap is None:
        return UNMEASURED_LEAD if limit is None else min(UNMEASURED_LEAD, UNMEASURED_SHARE * limit)
    lead = 2 * longest_gap + 2 * save + SLACK + margin
    return lead if limit is None else min(lead, LARGEST_SHARE * limit)


def warn_of_slow_saves(
    durations: Durations, preemption: float | None, lead: float, limit: float | None
) -> str | None:
    """What a run is warned of whose saves take too long for what its job may leave them.

    In seconds: `preemption` is what a preemption leaves, None if there is none; `lead` how long
    before the job's end a stop begins, as from `stop_lead`; `limit` its whole time, None without.
    """
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
    """The ranks were asked to commit and leave."""
    FAILING = "failing"
    """A rank failed: the others, asked to stop or not, are given a moment to leave."""
    COLLECTING_EVIDENCE = "collecting evidence"
    """Nothing moves: the ranks and their nodes say what they see, before they are killed."""
    KILLING = "killing"
    """Time is up: whatever is left is killed."""
    ABANDONED = "abandoned"
    """A rank cannot be killed, and is left behind: it is stuck in the kernel, or its node is gone.
    """
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
    """What an attempt may not outstay; what happens then."""

    RECONNECT = "reconnect"
    """A rank whose connection broke off counts as gone."""
    JOIN = "join"
    """A rank that never connected counts as gone."""
    STOP = "stop"
    """The ranks, asked to stop, are killed."""
    CRASH = "crash"
    """The ranks that outlived another are killed."""
    EVIDENCE = "evidence"
    """The ranks that hang are killed."""
    ABANDON = "abandon"
    """The ranks that were killed, and are still there, are left behind."""


STAYS: Final = None
"""In the table: what happens is of no account in this state."""

_S, _T, _D = AttemptState, Trigger, Deadline
_COLLECTING = AttemptState.COLLECTING_EVIDENCE

_COLUMNS = (
    _T.RANK_JOINED, _T.ALL_JOINED,
    _T.STOP_REQUESTED, _T.RANK_FAILED, _T.HANG_FOUND, _T.OUTSTAYED, _T.TIME_UP, _T.ALL_ENDED,
)  # fmt: skip

# A stop or a failure has a deadline of its own: from then on standing still is no hang. A hang that
# was found goes first: neither a stop nor a failure keeps its evidence from being collected.
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
"""For every state, where whatever may happen leads to."""

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
"""What begins a deadline after which all that is left is killed, and at last left behind."""

OVER: Final = frozenset({AttemptState.ABANDONED, AttemptState.ENDED})
"""The states after which nothing is left to follow."""


@dataclass(frozen=True)
class AttemptLife:
    """An attempt is in `state` since `since`, and its time is up at `until`; seconds of one clock.

    `graces` has the seconds of each deadline in `BEGINS`. The earliest of those that were begun
    counts: a stop gives a rank that has to leave because of another rank no more time, and vice
    versa. The deadline after the kill is separate."""

    graces: Mapping[Deadline, float]
    state: AttemptState
    since: float
    until: float = inf

    def after(self, trigger: Trigger, now: float, within: float = inf) -> AttemptLife:
        """What it is after something has happened that allows for `within` seconds at most.

        The same trigger again may bring the end nearer, and never puts it off."""
        state = TRANSITIONS[self.state, trigger] or self.state
        begun, until = BEGINS.get(trigger), self.until
        if begun in DEADLINES[state]:
            grace = min(self.graces[begun], within)
            # A rank that is killed now gets that time, whatever deadline was begun before.
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
class StopSoFar:
    """What is known of a stop, and of the `loop` of a program of the user's own.

    `standing` is what the ranks were told, None until they are asked to stop; `said` is why they
    stop by their own words. `unrecorded` is what the ledger does not tell yet, and since when.
    `by_user` is whether a person asked for it: then no signal is a warning of Slurm's. `signalled`
    is whether a rank has said that a signal came to it."""

    signals: list[ReceivedSignal] = field(default_factory=list)
    standing: StandingStop | None = None
    said: StopReason = StopReason.NONE
    unrecorded: tuple[StopRequested, float] | None = None
    loop: ReportedLoop = ReportedLoop.UNKNOWN
    by_user: bool = False
    signalled: bool = False

    @property
    def reason(self) -> StopReason:
        """Why the ranks were asked to stop, or said that they do; NONE if there was no request."""
        if self.standing is None:
            return StopReason.NONE
        if self.standing.reason is StopReason.PEER_STOPPED and self.said:
            return self.said  # they know why that one was asked
        return max(self.standing.reason, self.said)
