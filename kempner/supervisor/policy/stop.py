"""Decides when to stop, from what Slurm says: pure functions, with reasons."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from kempner.cluster.slurm.job import JobEvent, JobState, classify
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.save_times import Durations, nearest_rank

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
ends, and the job goes back into the queue. Slurm takes no job back whose time is over."""

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
    """Stop for `reason`, of which `sentence` says more, within `seconds_left`."""

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
    holds, for by then the supervisor ends the ranks that are still there.
    """
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
    the job itself, or the job may not be requeued: no margin is kept.
    """
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
    in earlier attempts; `limit` is the job's whole time in seconds, None without one.
    """
    long = nearest_rank(measured, 0.95)
    margin = EXIT_MARGIN if long is None else max(EXIT_MARGIN, MARGIN_FACTOR * long)
    return margin if limit is None else min(margin, MARGIN_SHARE * limit)


def time_to_abandon(left: float | None, patience: float) -> float:
    """Seconds to wait until a killed rank is gone, of `left` until the job's end.

    About half of them: the rest is for the requeue, even if a rank is stuck in the kernel.
    """
    return patience if left is None else min(patience, max(SHORTEST_KILL, left / 2))


def stop_lead(
    durations: Durations, longest_gap: float | None, limit: float | None, margin: float
) -> float:
    """Seconds before the end at which a stop must begin.

    `longest_gap` is the 95th percentile of the seconds between two votes: one passes until the
    ranks agree, and the step that they are in takes another. A save may be under way, and the last
    one follows it; then comes the `margin`. `limit` is the job's whole time in seconds, None
    without one.
    """
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
