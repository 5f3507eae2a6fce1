"""Requeues the Slurm job after the ranks have exited, or says why not."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kempner.cluster.slurm.job import JobState, restart_count
from kempner.cluster.slurm.scontrol import SlurmError
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.logs import logger
from kempner.run.record.events.job import NotRequeued, Requeued, RequeueRefused, Resubmitted
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.requeue import decide_requeue, requeues_without_progress
from kempner.supervisor.slurm.job_monitor import JobMonitor, excluded
from kempner.supervisor.slurm.resubmit import resubmit


def requeue_or_explain(
    job: JobMonitor,
    at_first: JobState | None,
    attempt: int,
    decision: Decision,
    run: RunDirectory,
    ledger: Ledger,
    history: RunHistory,
) -> None:
    """Put the job back into the queue after an attempt, or say why not.

    `at_first` is the job as it was when the attempt began, None if Slurm did not say.
    """
    job.close()
    state = job.state()
    step = history.refresh().last_step
    fruitless = requeues_without_progress(history, job.id, step)
    bad = decision.bad_nodes
    scarce = bool(bad) and job.finds_others(bad) is False
    chosen = decide_requeue(decision, at_first, state, job.batch, fruitless, scarce)
    if not chosen.requeue:
        if decision.code is ExitCode.STOPPED or decision.bad_nodes:
            logger().warning(chosen.reason)
            ledger.record(NotRequeued(step, chosen.reason), attempt)
        if state is not None and state.restarts > restart_count(os.environ):
            job.ask_for_all()  # Slurm itself brings it back, as small as it has become
        return
    # Written first: Slurm ends this process with the job's others.
    why, preempted = chosen.reason, state is not None and state.times.preempt is not None
    ledger.record(Requeued(step, *job_facts(job), reason=why, preempted=preempted), attempt)
    logger().warning(chosen.reason)
    avoided, after = ((), job.node_timeout()) if scarce else (bad, 0.0)
    if refusal := job.requeue(avoided, after):
        ledger.record(RequeueRefused(refusal), attempt)
        # Only bad nodes matter: what its user has excluded, the new job is submitted with anyway.
        without = excluded(state, avoided) if avoided else []
        logger().error(f"{refusal}; {_go_on(job, run, ledger, attempt, without)}")


def _go_on(
    job: JobMonitor, run: RunDirectory, ledger: Ledger, attempt: int, without: Sequence[str]
) -> str:
    """What becomes of a run that Slurm did not take back: submitted again, or what to type."""
    if job.arguments is not None:
        try:
            new = resubmit(job.id, job.arguments, run.attempt(attempt), without)
        except (SlurmError, ValueError) as error:
            return f"slurm.resubmit failed: {error}; submit the same command again to continue"
        ledger.record(Resubmitted(job.id, as_job=new), attempt)
        return f"the run continues as job {new}"
    return "submit the same command again to continue, or set slurm.resubmit=true"


def job_facts(job: JobMonitor) -> tuple[str, int, str | None]:
    """What the ledger keeps about the job in which an attempt runs: id, restarts, nodes."""
    return job.id, restart_count(os.environ), os.environ.get("SLURM_JOB_NODELIST")
