"""Whether Slurm answers, may requeue the job, and gives it the time that it asks for."""

from __future__ import annotations

from dataclasses import dataclass

from kempner.insight.doctor.facts.plan import Plan
from kempner.insight.doctor.facts.slurm import SlurmFacts
from kempner.insight.doctor.finding import Outcome, fail, passed, skipped, warn


@dataclass(frozen=True)
class JobFacts:
    """Whether the job may be requeued, and its whole time in seconds; None where nobody says."""

    may_requeue: bool | None
    limit: float | None
    batch: bool = True


def check_slurm(slurm: SlurmFacts | None, used: bool) -> Outcome:
    """Whether controller and accounting answer; `used` is whether the run is to be a Slurm job."""
    if slurm is None:
        if used:
            return fail("there is no Slurm on this host: submit from a login node of the cluster")
        return skipped("there is no Slurm on this host")
    if slurm.controller:
        if not used:
            return skipped(
                "Slurm does not answer here, and the run is taken for one of this machine: name "
                "its batch script with --script if it is a job"
            )
        return fail(f"{slurm.controller}: see `scontrol ping`, and start again when it answers")
    if slurm.accounting:
        return warn(
            f"the accounting does not answer ({slurm.accounting}): slurm.resubmit and `kempner "
            "status` need it"
        )
    return passed("the controller and the accounting answer")


def check_requeue(job: JobFacts, plan: Plan | None, resubmit: bool) -> Outcome:
    """Whether the job comes back after an interruption."""
    if not job.batch:
        return skipped("the allocation is interactive: it ends with its time")
    if job.may_requeue is None and plan is None:
        return skipped("no batch script is known: name it with --script")
    if job.may_requeue is None:
        return skipped("the cluster's JobRequeue decides: `#SBATCH --requeue` makes sure of it")
    if job.may_requeue:
        return passed("the job may be requeued")
    if resubmit:
        return passed("the job may not be requeued, and slurm.resubmit submits it again")
    where = "the job" if plan is None else plan.source
    return warn(
        f"{where} may not be requeued, so that the run ends with it: write `#SBATCH --requeue`, or "
        "set slurm.resubmit=true"
    )


def check_time(slurm: SlurmFacts | None, limit: float | None) -> Outcome:
    """Whether the partition is open, and gives as much time as is asked for."""
    partition = None if slurm is None else slurm.partition
    if slurm is not None and slurm.no_partition:
        return fail(f"the partition cannot be used: {slurm.no_partition}; correct --partition")
    if partition is None:
        return skipped("no partition is named")
    if not partition.up:
        return fail(f"partition {partition.name} is not up: a job would wait; choose another one")
    if limit is not None and partition.longest is not None and limit > partition.longest:
        return fail(
            f"--time asks for {limit / 3600:.1f} h, and partition {partition.name} gives "
            f"{partition.longest / 3600:.1f} h: the job would wait for ever; ask for less"
        )
    return passed(f"partition {partition.name} is up")
