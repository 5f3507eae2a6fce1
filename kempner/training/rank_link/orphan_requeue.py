"""Requeues the job from a rank whose supervisor is gone.

When the node of the batch script dies, a job submitted with --no-kill stays RUNNING on its other
nodes, with nobody left to requeue it (seen on Slurm 22.05). Its ranks leave, with a checkpoint if
all of them live, and the lowest of those that do asks Slurm.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.job import JobState, parse_job, restart_count
from kempner.cluster.slurm.scontrol import SlurmError
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.logs import logger
from kempner.run.record.attempts import Attempt
from kempner.run.record.events.job import Requeued
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory

RESUMABLE = (ExitCode.STOPPED, ExitCode.PEERS_LOST)
"""The ends after which the run goes on from its newest checkpoint, as soon as it is started."""

TURN = 2.0
"""Seconds after a rank in which the next one has its turn: they notice the silence so far apart."""

LONGEST = 30.0
"""Seconds after which every rank has had its turn."""


@dataclass(frozen=True)
class OrphanDecision:
    """Whether to put the job back into the queue; `reason` is for a person to read."""

    requeue: bool
    reason: str


def decide_orphan_requeue(job: JobState, restarts: int) -> OrphanDecision:
    """Only a job that runs: to requeue one that was cancelled would bring it back to life.

    `restarts` is how often it was when this rank was started. A rank on a node that was cut off may
    outlive its launch, and must leave the next one alone.
    """
    if not job.running:
        return OrphanDecision(False, f"the job is {job.state}: Slurm decides what happens to it")
    if job.restarts != restarts:
        return OrphanDecision(
            False, "the job was started again in the meantime: it continues there"
        )
    if not job.may_requeue:
        return OrphanDecision(
            False, "the job was submitted with --no-requeue: submit it again to continue"
        )
    return OrphanDecision(True, "the supervisor is gone: requeueing the job")


def hand_back(job: str, run: RunDirectory, attempt: Attempt, rank: int) -> None:
    """Requeue `job`, if it runs and no other rank of this attempt did; lower ranks first."""
    time.sleep(min(rank * TURN, LONGEST))
    if not _claim(run, attempt, rank):
        return
    try:
        state = parse_job(scontrol.show_job(job))
        verdict = decide_orphan_requeue(state, restart_count(os.environ))
        logger().warning(verdict.reason)
        if verdict.requeue:
            # Written first: Slurm ends this process with the job's others.
            _record(job, run, attempt, rank, state)
            scontrol.requeue(job)
    except (SlurmError, ValueError) as error:
        logger().error(f"{error}; submit the same command again to continue")


def _claim(run: RunDirectory, attempt: Attempt, rank: int) -> bool:
    """Whether this rank is the first to say that it will: only one can create the file."""
    try:
        with open(run.claim(attempt.number), "x", encoding="utf-8") as file:
            file.write(f"{rank}\n")
    except FileExistsError:
        return False
    return True


def _record(job: str, run: RunDirectory, attempt: Attempt, rank: int, state: JobState) -> None:
    event = Requeued(
        step=RunHistory.read(run.ledger).last_step,
        job=job,
        restarts=state.restarts,
        nodes=state.nodes.held,
        by_rank=rank,
    )
    Ledger(run.ledger).record(event, attempt.number)
