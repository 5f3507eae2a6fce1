"""Decides whether to requeue the job, from what Slurm says: pure functions, with reasons."""

from __future__ import annotations

from itertools import takewhile

from kempner.cluster.slurm.job import JobEvent, JobState, classify
from kempner.cluster.slurm.scontrol import RequeueDecision
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import NotRequeued, ProgramAdvanced, Requeued, Resubmitted
from kempner.run.record.history import RunHistory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.stop import PREEMPTED

MAX_REQUEUES_WITHOUT_PROGRESS = 3
"""Times in a row that a job is put back into the queue without a new step."""

RESUMES_ELSEWHERE = (ExitCode.STOPPED, ExitCode.STORAGE_UNAVAILABLE)
"""Ends after which the run goes on when the job comes back, later and perhaps on other nodes."""


SLURM_SILENT = "Slurm does not respond: submit the same command again to continue"

_WHAT_BECOMES_OF_IT = {
    JobEvent.REQUEUE: "Slurm requeues the job itself: it continues from its checkpoint",
    JobEvent.CANCEL: "the job was cancelled: submit it again to continue",
    JobEvent.TIME_LIMIT_REACHED: "the job's time is over: submit it again to continue",
}


def decide_requeue(
    decision: Decision,
    first: JobState | None,
    job: JobState | None,
    batch: bool,
    fruitless: int,
    scarce: bool = False,
) -> RequeueDecision:
    """Whether to put the job back into the queue; `first` is the job as it was at the beginning,
    `job` as it is, None if Slurm did not say in time.

    Only a job that still runs: asked to requeue one that was cancelled, Slurm brings it back to
    life. `fruitless` counts the times in a row that it came back and made no step; for a preemption
    it is never too often. `scarce` says that there are not enough nodes besides the bad ones: a job
    that excluded them could never start, and Slurm would hold it for good.
    """
    if decision.code not in RESUMES_ELSEWHERE and not decision.bad_nodes:
        return RequeueDecision(False, decision.reason)
    if not batch:
        return RequeueDecision(
            False, "this is an interactive allocation: start again in it to continue"
        )
    if job is None:
        return RequeueDecision(False, SLURM_SILENT)
    if not job.running:
        unclear = f"the job is {job.state}: if Slurm does not requeue it, submit it again"
        # Without an earlier look a requeue that Slurm has begun looks like a cancel.
        known = first is not None or job.state != "COMPLETING"
        told = _WHAT_BECOMES_OF_IT.get(classify(first or job, job), unclear) if known else unclear
        return RequeueDecision(False, _held(job) or told)
    if first is not None and job.restarts != first.restarts:
        return RequeueDecision(
            False, "the job was started again in the meantime: it continues there"
        )
    if fruitless >= MAX_REQUEUES_WITHOUT_PROGRESS and job.times.preempt is None:
        return RequeueDecision(
            False,
            f"the job came back {fruitless} times without a new step: it is stopped too soon. "
            "Give it a longer --time or a shorter --signal, then submit it again",
        )
    if not job.may_requeue:
        return RequeueDecision(False, "the job was submitted with --no-requeue", refused=True)
    why = f"{PREEMPTED}: " if job.times.preempt is not None else ""
    where, bad = "", ", ".join(decision.bad_nodes)
    if bad and scarce:
        where = f", to wait for {bad} because there are too few other nodes"
    elif bad:
        where = f" without {bad}"
    what = f"requeueing the job{where}; it continues from its checkpoint"
    return RequeueDecision(True, why + what)


def _held(job: JobState) -> str:
    held = "Slurm holds the job: it continues from its checkpoint once it is released"
    return held if job.held else ""


def requeues_without_progress(history: RunHistory, job: str, step: int | None) -> int:
    """How many of the last requeues of `job`, in a row, found the run at `step`, where it is.

    A job that was submitted again by its supervisor is the same job. Requeues of any other job do
    not count: a user has submitted that one. Nor does a preemption, which the run cannot prevent.
    Of a program that does not say what it saves, only those count after which it made no progress
    (`policy.program`).
    """
    chain, steps, submitted = {job}, list[int | None](), False
    kinds = (Requeued, NotRequeued, Resubmitted, ProgramAdvanced)
    for event in reversed(history.events(*kinds)):
        if isinstance(event, ProgramAdvanced):
            break
        if isinstance(event, Resubmitted):
            submitted = event.as_job in chain
            chain |= {event.job} if submitted else set()
        elif isinstance(event, NotRequeued):
            steps += [event.step] if submitted else []
            submitted = False
        elif isinstance(event, Requeued) and event.job in chain and not event.preempted:
            steps.append(event.step)
    return sum(1 for _ in takewhile(lambda before: before == step, steps))
