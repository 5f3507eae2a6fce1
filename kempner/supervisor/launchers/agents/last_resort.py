"""Puts the job back into the queue from an agent, where its supervisor is gone and no rank does it.

The batch process or the batch host may be lost between two attempts, or while every rank is stuck:
then the agents are all that is left. The first ones in the job's order ask, one after the other:
each looks at the job directly before, and a second request for a job that is on its way into the
queue is refused ("Job is pending execution", Slurm 22.05 to 26.05). The one whose request Slurm
took tells of it in the ledger.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from functools import partial

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmError
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

STORAGE_WITHIN, RECORD_WITHIN = 15.0, 5.0
"""Seconds that an agent which could leave waits for storage: to say whether the run has a
supervisor, which takes a few renewals of its lease, and to record the requeue."""

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
    among the job's agents, `number` and `restarts` say which launch of which job it belongs to.

    A thread does it: neither storage that hangs nor ranks that are stuck hold it up for long."""

    def __init__(
        self,
        run: RunDirectory,
        task: int,
        number: str,
        restarts: int,
        means: SlurmAccess | None = None,
    ) -> None:
        self._run, self._task, self._means = run, task, means
        self._launch = number, restarts
        self._thread: threading.Thread | None = None
        self._leaves, self._asks, self._asked = (threading.Event() for _ in range(3))

    @classmethod
    def here(cls, run: RunDirectory, environ: Mapping[str, str]) -> LastResort:
        """Of this process, the task of a step."""
        task, number = int(environ["SLURM_PROCID"]), environ["SLURM_JOB_ID"]
        return cls(run, task, number, restart_count(environ))

    def begin(self, job: str | None, attempt: int, ending: bool = True) -> None:
        """The supervisor is gone: see to the job, once. `ending` as in `decide_last_resort`."""
        if job is not None and self._thread is None and self._task < ASKING:
            act = partial(self._see_to_it, job, attempt, ending)
            self._thread = started(helper_thread(act, "last resort"))

    def finish(self, job: str | None, attempt: int) -> None:
        """The agent leaves because the supervisor is gone, and no rank is left here."""
        self.begin(job, attempt, ending=False)
        self._leaves.set()
        if self._thread is not None and self._asks.wait(STORAGE_WITHIN):
            self._asked.wait()
            self._thread.join(RECORD_WITHIN)

    def _see_to_it(self, job: str, attempt: int, ending: bool) -> None:
        try:
            if not self._supervisor_sees_to_it(ending):
                turn = time.monotonic() + self._task * TURN
                if ending:
                    self._leaves.wait(self._task * TURN)
                self._put_back(job, attempt, ending, turn)
        finally:
            self._asks.set()
            self._asked.set()

    def _put_back(self, job: str, attempt: int, ending: bool, turn: float) -> None:
        history, superseded = self._history(), self._is_superseded()
        again = requeues_without_progress(history, job, history.last_step)
        fruitless, (_, restarts) = again >= MAX_REQUEUES_WITHOUT_PROGRESS, self._launch
        decide = lambda state: decide_last_resort(  # noqa: E731
            state, restarts, superseded, fruitless, ending
        )
        self._asks.set()
        if not self._may_be_needed(job, decide):
            return
        time.sleep(max(0.0, turn - time.monotonic()))
        end = scontrol.put_back(job, decide, time.monotonic() + TRY_FOR, means=self._means)
        self._asked.set()
        logger().info(end.reason)
        if end.outcome is RequeueOutcome.DONE and end.asked is not None and not end.by_another:
            held = end.asked.nodes.held
            requeued = Requeued(history.last_step, job, end.asked.restarts, held, reason=end.reason)
            Ledger(self._run.ledger).record(requeued, attempt)

    def _may_be_needed(self, job: str, decide: Callable[[JobState], RequeueDecision]) -> bool:
        """Whether there is something to wait for: an agent that leaves holds up its job."""
        try:
            return decide((self._means or SlurmAccess()).look(job)).requeue
        except SlurmError:
            return True

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

    def _is_superseded(self) -> bool:
        """Whether another launch has the run by now, as far as storage says."""
        try:
            seen = look(self._run.supervisors)
        except OSError:
            return False
        holder = None if seen is None else seen.holder
        return holder is not None and (holder.job, holder.restarts) != self._launch

    def _history(self) -> RunHistory:
        try:
            return RunHistory.read(self._run.ledger)
        except OSError:
            return RunHistory()
