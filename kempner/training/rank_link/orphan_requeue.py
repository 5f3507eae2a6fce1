"""Requeues the job from a rank whose supervisor is gone.

When the node of the batch script dies, a job submitted with --no-kill stays RUNNING on its other
nodes, with no supervisor to requeue it. When the supervisor alone is killed, Slurm ends the job as
failed, and gives its tasks KillWait seconds (both seen on Slurm 22.05). The ranks leave, with a
checkpoint if all of them live, and the lowest rank that lives asks Slurm for the requeue.

Tells whether a run's supervisor has died: by its lease, which it renews as long as it lives.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from kempner.cluster.slurm.command import SlurmError
from kempner.cluster.slurm.job import JobState, restart_count
from kempner.cluster.slurm.scontrol import RequeueDecision, RequeueOutcome, SlurmAccess, put_back
from kempner.run.output.logs import logger
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.attempts import Attempt, read_current
from kempner.run.record.events import Requeued
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import (
    RELEASED,
    RENEWALS,
    Holder,
    LeaseReading,
    holder_lives,
    look,
)
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory

RESUMABLE = (ExitCode.STOPPED, ExitCode.PEERS_LOST)
"""The ends after which the run goes on from its newest checkpoint, as soon as it is started."""

TURN = 2.0
"""Seconds after a rank in which the next one has its turn: they notice the silence so far apart."""

LONGEST = 30.0
"""Seconds after which every rank has had its turn."""

TRY_FOR = 3600.0
"""Seconds for which to ask a Slurm that does not answer; as a rule it ends this process before."""

_LOOK = 0.2
"""Seconds between two looks whether another rank does it."""

_SCRIPT_DIED = ("JobLaunchFailure", "NonZeroExitCode", "RaisedSignal")
"""What Slurm says of a job whose batch script was killed, the last with the signal behind it. It
gives no reason for a job that was cancelled."""


def decide_orphan_requeue(
    job: JobState, restarts: int, superseded: bool, fruitless: bool = False
) -> RequeueDecision:
    """Only a job that runs, or that ends because its batch script, the supervisor, was killed.

    To requeue one that was cancelled would bring it back to life. `restarts` is how often it was
    when this rank was started: a rank on a node that was cut off may outlive its launch, and must
    leave the next one alone. `superseded` is whether the run has a newer attempt, `fruitless`
    whether the supervisor was lost before, and nothing saved since.
    """
    if superseded:
        return RequeueDecision(False, "the run has a newer attempt: it continues there")
    if job.restarts != restarts:
        return RequeueDecision(
            False, "the job was started again in the meantime: it continues there"
        )
    script_died = job.state in ("COMPLETING", "FAILED") and job.reason.startswith(_SCRIPT_DIED)
    if not (job.running or script_died):
        return RequeueDecision(False, f"the job is {job.state}: Slurm decides what happens to it")
    if not job.may_requeue:
        return RequeueDecision(
            False, "the job was submitted with --no-requeue: submit it again to continue"
        )
    if fruitless:
        return RequeueDecision(
            False,
            "the supervisor was lost again before a new step was saved: look at why, then submit "
            "the job again",
        )
    return RequeueDecision(True, "the supervisor is gone: requeueing the job")


def hand_back(
    job: str, run: RunDirectory, attempt: Attempt, rank: int, means: SlurmAccess | None = None
) -> None:
    """Requeue `job`, once, if no other rank of this attempt does; lower ranks first.

    Slurm is asked until it answers. That the job went back is written to the ledger afterwards:
    Slurm leaves this process some seconds.
    """
    if not _has_turn(run, attempt, rank):
        return
    fruitless = _fruitless(_history(run), job)
    decide = lambda state: decide_orphan_requeue(  # noqa: E731
        state, restart_count(os.environ), _superseded(run, attempt), fruitless
    )
    end = put_back(job, decide, time.monotonic() + TRY_FOR, _note_silence, means)
    if end.outcome is RequeueOutcome.DONE and end.asked is not None:
        _record(job, run, attempt, rank, end.asked)
    unanswered = end.outcome in (RequeueOutcome.REFUSED, RequeueOutcome.SILENT)
    logger().warning(
        f"{end.reason}; submit the same command again to continue" if unanswered else end.reason
    )


def _has_turn(run: RunDirectory, attempt: Attempt, rank: int) -> bool:
    """Wait for this rank's turn; whether no other rank has said by then that it does it."""
    turn = time.monotonic() + min(rank * TURN, LONGEST)
    while time.monotonic() < turn:
        if run.claim(attempt.number).exists():
            return False
        time.sleep(_LOOK)
    return _claim(run, attempt, rank)


def _claim(run: RunDirectory, attempt: Attempt, rank: int) -> bool:
    """Whether this rank is the first to say that it will: only one can create the file.

    Where storage fails, each does it in its turn, and sees whether the job went back before.
    """
    try:
        with open(run.claim(attempt.number), "x", encoding="utf-8") as file:
            file.write(f"{rank}\n")
    except FileExistsError:
        return False
    except OSError as error:
        logger().warning("cannot tell the other ranks of the requeue", reason=error.strerror)
    return True


def _superseded(run: RunDirectory, attempt: Attempt) -> bool:
    """Whether a newer attempt is current, as far as storage says."""
    try:
        current = read_current(run.attempts)
    except (OSError, KeyError, ValueError) as error:
        logger().warning("cannot read which attempt is current", reason=str(error))
        return False
    return current is not None and current != attempt


def _fruitless(history: RunHistory, job: str) -> bool:
    """Whether a rank has requeued this job before, and the run is where it was."""
    mine = [event for event in history.events(Requeued) if event.job == job]
    return bool(mine) and mine[-1].by_rank is not None and mine[-1].step == history.last_step


def _history(run: RunDirectory) -> RunHistory:
    """What the ledger says; nothing where it cannot be read."""
    try:
        return RunHistory.read(run.ledger)
    except OSError as error:
        logger().warning("cannot read the ledger", reason=error.strerror)
        return RunHistory()


def _note_silence(error: SlurmError) -> None:
    logger().info("Slurm gives no answer; asking again", reason=str(error))


def _record(job: str, run: RunDirectory, attempt: Attempt, rank: int, state: JobState) -> None:
    event = Requeued(
        step=_history(run).last_step,
        job=job,
        restarts=state.restarts,
        nodes=state.nodes.held,
        by_rank=rank,
    )
    Ledger(run.ledger).record(event, attempt.number)


STILL = 2.5
"""Renewals that must be missing for the holder of a lease to be dead. This is shorter than the
lease: it is asked only where the supervisor's port refuses connections, too."""

LOOK_EVERY = 0.5
"""Seconds between two looks at a file that hundreds of ranks may look at."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a lease, unchanged since `since`, in seconds of some clock."""

    seen: LeaseReading
    since: float


def has_died(watched: Watched, now: float, machine: str, lives: bool) -> bool:
    """Whether the holder of a lease is dead, rather than that it has left in order.

    `machine` is this one, and `lives` whether the process is there that the lease names.
    """
    seen = watched.seen
    if seen.beat == RELEASED or seen.holder is None:
        return False
    if seen.holder.machine == machine:
        return not lives
    return now - watched.since > STILL * seen.holder.lasts / RENEWALS


class SupervisorWatch:
    """Looks at the lease of the supervisor that has started this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._clock = folder, AwakeClock()
        self._here = Holder.here(0.0).machine
        self._watched: Watched | None = None
        self._looked_at = -LOOK_EVERY
        self._died = False

    def died(self) -> bool:
        """Whether it is dead: known at once on its machine, elsewhere after a few renewals."""
        now = self._clock.now()
        if not self._died and now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._died = self._look(now)
        return self._died

    def _look(self, now: float) -> bool:
        try:
            seen = look(self._folder)
        except (OSError, ValueError):
            return False  # storage that fails says nothing
        if seen is None:
            return False
        if self._watched is None or self._watched.seen != seen:
            self._watched = Watched(seen, now)
        return has_died(self._watched, now, self._here, holder_lives(seen.holder))
