"""When to stop and whether to requeue, from what Slurm says: pure functions, with reasons."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

from kempner.checkpoint.durations import Durations
from kempner.cluster.job import Event, JobState, classify
from kempner.run.exit_codes import ExitCode
from kempner.supervisor.policy import Decision

UNMEASURED_LEAD = 120.0
"""Seconds before the end at which to stop, as long as nothing was measured."""

UNMEASURED_SHARE = 0.25
"""Of the job's whole time, the most that is kept free as long as nothing was measured: a short job
would otherwise be stopped before it has begun."""

LARGEST_SHARE = 0.5
"""Of the job's whole time, the most that is ever kept free: after one save that took for ever,
every job would be stopped as it begins, and no other save would be measured."""

EXIT_MARGIN = 10.0
"""Seconds for the processes to leave, and for the job to be put back into the queue."""

FRUITLESS = 3
"""Times in a row that a job is put back into the queue without a new step."""

_PREEMPTED = "a job of higher priority takes the nodes"


@dataclass(frozen=True)
class Advice:
    """Stop, because of `reason`, within `seconds_left`."""

    reason: str
    seconds_left: float


def advise(
    first: JobState, now: JobState, kill_wait: float, left: float | None, lead: float, warned: bool
) -> Advice | None:
    """Whether the ranks are to stop; `first` is the job as it was when the attempt began.

    `left` is the number of seconds until the end of the job, None without one, `lead` how long
    before it a stop must begin, `warned` whether a signal came. After a preemption's grace time, as
    at any end of a job, Slurm sends SIGTERM and waits for `kill_wait` seconds; it keeps both times
    or exceeds them.
    """
    match classify(first, now, warned):
        case Event.NOTHING:
            if left is not None and left <= lead:
                return Advice(f"{left:.0f} s are left of the job's time", max(0.0, left))
            return None
        case Event.TIME_LIMIT:
            return None if left is None else Advice("Slurm gave a warning", max(0.0, left))
        case Event.PREEMPTION:
            grace = 0.0 if left is None else max(0.0, left)
            return Advice(_PREEMPTED, grace + kill_wait)
        case event:
            return Advice(event.value, kill_wait)


def stop_lead(durations: Durations, longest_gap: float | None, limit: float | None) -> float:
    """Seconds before the end at which a stop must begin.

    `longest_gap` is the 95th percentile of the seconds between two votes: one passes until the
    ranks agree, and the step that they are in takes another. A save may be under way, and the last
    one follows it. `limit` is the job's whole time in seconds, None without one.
    """
    save = durations.quantile(0.95)
    if save is None or longest_gap is None:
        return UNMEASURED_LEAD if limit is None else min(UNMEASURED_LEAD, UNMEASURED_SHARE * limit)
    lead = 2 * longest_gap + 2 * save + EXIT_MARGIN
    return lead if limit is None else min(lead, LARGEST_SHARE * limit)


@dataclass(frozen=True)
class Parting:
    """What becomes of the job when the ranks have left. `reason` is for a person to read."""

    requeue: bool
    reason: str


_WHAT_BECOMES_OF_IT = {
    Event.REQUEUE: "Slurm puts the job back into the queue itself: it goes on from its checkpoint",
    Event.CANCEL: "the job was cancelled: submit it again, and it goes on",
    Event.TIME_LIMIT_REACHED: "the job's time is over: submit it again, and it goes on",
}


def part(
    decision: Decision,
    first: JobState | None,
    job: JobState | None,
    batch: bool,
    fruitless: int,
    scarce: bool = False,
) -> Parting:
    """Whether to put the job back into the queue; `first` is the job as it was at the beginning.

    Only a job that still runs: asked to requeue one that was cancelled, Slurm brings it back to
    life. `fruitless` counts the times in a row that it came back and made no step; for a preemption
    it is never too often. `scarce` says that there are not enough nodes besides the bad ones: a job
    that excluded them could never start, and Slurm would hold it for good.
    """
    if decision.code is not ExitCode.STOPPED and not decision.bad_nodes:
        return Parting(False, decision.reason)
    if not batch:
        return Parting(False, "the allocation is yours: start again in it to go on")
    if job is None:
        return Parting(False, "Slurm does not answer: submit the same command again to go on")
    if not job.running:
        unclear = f"the job is {job.state}: if Slurm does not bring it back, submit it again"
        return Parting(False, _WHAT_BECOMES_OF_IT.get(classify(first or job, job), unclear))
    if first is not None and job.restarts != first.restarts:
        return Parting(False, "the job was started again meanwhile: it goes on there")
    if not job.may_requeue:
        return Parting(
            False, "the job was submitted with --no-requeue: submit it again, and it goes on"
        )
    if fruitless >= FRUITLESS and job.preempt_time is None:
        return Parting(
            False,
            f"the job came back {fruitless} times and made no new step: it is stopped too soon. "
            "Give it a longer --time or a shorter --signal, then submit it again",
        )
    why = f"{_PREEMPTED}: " if job.preempt_time is not None else ""
    where, bad = "", ", ".join(decision.bad_nodes)
    if bad and scarce:
        where = f", waits for {bad} because there are too few others"
    elif bad:
        where = f" without {bad}"
    what = f"the job goes back into the queue{where}, and on from its checkpoint"
    return Parting(True, why + what)


def fruitless_requeues(events: Iterable[Mapping[str, Any]], job: str, step: int | None) -> int:
    """How many of the last requeues of `job`, in a row, found the run at `step`, where it is.

    Those of an earlier job do not count: somebody has submitted it again, and hopes for better. Nor
    does a preemption, which the run can do nothing about.
    """
    mine = [e for e in events if e.get("event") == "requeued" and e.get("job") == job]
    requeues = [event for event in mine if not event.get("preempted")]
    return sum(1 for _ in takewhile(lambda e: e["step"] == step, reversed(requeues)))
