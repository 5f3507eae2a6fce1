"""Puts the job back into the queue from an agent, where its supervisor is gone and no rank does it.

The batch process or the batch host may be lost between two attempts, or while every rank is stuck:
then the agents are all that is left. The first ones in the job's order ask, one after the other:
each looks at the job directly before, and a second request for a job that is on its way into the
queue is refused ("Job is pending execution", Slurm 22.05 to 26.05).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from functools import partial

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.job import JobState, restart_count
from kempner.cluster.slurm.scontrol import RequeueDecision, RequeueOutcome, SlurmAccess
from kempner.run.output.logs import logger
from kempner.run.process.threads import helper_thread, started
from kempner.run.record.events import Requeued
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import RELEASED, is_owned, look
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.restart import (
    MAX_REQUEUES_WITHOUT_PROGRESS,
    requeues_without_progress,
)

ASKING = 8
"""How many agents of a job ask: a large job is no load to the controller."""

TURN = 2.0
"""Seconds after an agent in which the next one has its turn."""

TRY_FOR = 60.0
"""Seconds for which to ask a Slurm that does not answer; as a rule it ends this process before."""


def decide_last_resort(
    job: JobState, restarts: int, superseded: bool, fruitless: bool, ending: bool
) -> RequeueDecision:
    """As for a rank (`scontrol.decide_orphan_requeue`). `ending` says that Slurm told the agents to
    leave: if the job runs all the same, its watchdog has had them told, and waits for them."""
    if ending and job.running:
        return RequeueDecision(False, "the job runs: its watchdog or a rank sees to it")
    return scontrol.decide_orphan_requeue(job, restarts, superseded, fruitless)


class LastResort:
    """What the agent of a node does for its job when its supervisor is gone. `task` is its place
    among the job's agents."""

    def __init__(
        self, run: RunDirectory, task: int, restarts: int, means: SlurmAccess | None = None
    ) -> None:
        self._run, self._task, self._restarts, self._means = run, task, restarts, means
        self._thread: threading.Thread | None = None
        self._leaves = threading.Event()

    @classmethod
    def here(cls, run: RunDirectory, environ: Mapping[str, str]) -> LastResort:
        """Of this process, the task of a step."""
        return cls(run, int(environ["SLURM_PROCID"]), restart_count(environ))

    def begin(self, job: str | None, attempt: int) -> None:
        """Slurm has told the agents to leave, and the supervisor is gone: see to the job, once,
        from a thread. The ranks may be stuck until Slurm kills them."""
        if job is not None and self._thread is None and self._task < ASKING:
            act = partial(self._put_back, job, attempt, ending=True)
            self._thread = started(helper_thread(act, "last resort"))

    def finish(self, job: str | None, attempt: int) -> None:
        """The agent leaves because the supervisor is gone, and no rank is left here."""
        if self._thread is not None:
            self._leaves.set()
            self._thread.join()
        elif job is not None and self._task < ASKING:
            self._put_back(job, attempt, ending=False)

    def _put_back(self, job: str, attempt: int, ending: bool) -> None:
        self._leaves.wait(self._task * TURN)
        if self._supervisor_sees_to_it(ending):
            return
        history = self._history()
        again = requeues_without_progress(history, job, history.last_step)
        fruitless = again >= MAX_REQUEUES_WITHOUT_PROGRESS

        def decide(state: JobState) -> RequeueDecision:
            superseded = self._is_superseded(state)
            return decide_last_resort(state, self._restarts, superseded, fruitless, ending)

        end = scontrol.put_back(job, decide, time.monotonic() + TRY_FOR, means=self._means)
        logger().info(end.reason)
        if end.outcome is RequeueOutcome.DONE and end.asked is not None:
            held = end.asked.nodes.held
            told = Requeued(history.last_step, job, end.asked.restarts, held, reason=end.reason)
            Ledger(self._run.ledger).record(told, attempt)

    def _supervisor_sees_to_it(self, ending: bool) -> bool:
        """Whether the run's supervisor has left in order, or, in a job that is not `ending`, is
        only out of reach from here. Storage that fails says neither."""
        try:
            seen = look(self._run.supervisors)
            left = seen is not None and seen.beat == RELEASED
            return left or (not ending and is_owned(self._run.supervisors))
        except OSError as error:
            logger().warning("cannot see whether the run has a supervisor", reason=error.strerror)
            return False

    def _is_superseded(self, job: JobState) -> bool:
        """Whether another launch has the run by now, as far as storage says."""
        try:
            seen = look(self._run.supervisors)
        except OSError:
            return False
        holder = None if seen is None else seen.holder
        return holder is not None and (holder.job, holder.restarts) != (job.id, self._restarts)

    def _history(self) -> RunHistory:
        try:
            return RunHistory.read(self._run.ledger)
        except OSError:
            return RunHistory()
