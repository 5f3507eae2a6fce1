"""Puts a job back into the queue: once, whatever becomes of Slurm's answers.

A request whose answer is lost may have been carried out. So the job is looked at before each try:
directly before, because a requeue brings a cancelled job back to life, and after, because a second
requeue would end the job's next launch.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import (
    SlurmError,
    SlurmRefusedError,
    SlurmUnclearError,
    next_pause,
    patiently,
)
from kempner.cluster.slurm.job import JobState

VERIFY_WITHIN = 10.0
"""Seconds for which to look whether a requeue that Slurm says has worked did work. Slurm kills this
process soon after one."""

UNCLEAR_TRIES = 4
"""Tries after which a refusal in words that are not known here counts as one."""


@dataclass(frozen=True)
class RequeueDecision:
    """Whether to put the job back into the queue; `reason` is for a person to read. `refused` says
    that Slurm would not take it."""

    requeue: bool
    reason: str
    refused: bool = False


class Outcome(Enum):
    """What became of it."""

    DONE = "the job is back in the queue"
    LEFT = "it was decided against"
    REFUSED = "Slurm does not take it back"
    SILENT = "Slurm did not answer until it was too late"


@dataclass(frozen=True)
class PutBack:
    """What became of a job: `reason` says why.

    `state` is the job as it was seen last, `asked` as it was before Slurm was first asked; None if
    that never was.
    """

    outcome: Outcome
    reason: str
    state: JobState | None = None
    asked: JobState | None = None


@dataclass(frozen=True)
class Means:
    """How to ask Slurm and to wait; tests have their own. `clock` is in seconds."""

    look: Callable[[str], JobState] = lambda job: scontrol.job_state(job, within=0.0)
    requeue: Callable[[str], None] = lambda job: scontrol.requeue(job)
    clock: Callable[[], float] = time.monotonic
    pause: Callable[[float], object] = time.sleep


def came_back(asked: JobState, now: JobState) -> bool:
    """Whether a job that was as `asked` when its requeue was asked for was requeued since."""
    return now.restarts > asked.restarts or now.queued


def put_back(
    job: str,
    decide: Callable[[JobState], RequeueDecision],
    until: float,
    on_failure: Callable[[SlurmError], None] = lambda error: None,
    means: Means | None = None,
) -> PutBack:
    """Requeue `job` if `decide` is for it, given the job as it is at that moment.

    Tries until `until` (seconds of `time.monotonic`). `on_failure` hears of each try that failed.
    """
    return _Attempt(job, decide, until, on_failure, means or Means()).carry_out()


class _Attempt:
    """The tries of one requeue. `asked` is the job as it was before the first of them."""

    def __init__(
        self,
        job: str,
        decide: Callable[[JobState], RequeueDecision],
        until: float,
        on_failure: Callable[[SlurmError], None],
        means: Means,
    ) -> None:
        self._job, self._decide, self._until = job, decide, until
        self._on_failure, self._means = on_failure, means
        self._asked: JobState | None = None
        self._reason = ""
        self._refusal: SlurmError | None = None
        self._lost: SlurmError | None = None
        self._taken = False
        self._tries = 0

    def carry_out(self) -> PutBack:
        """Look, decide, ask; again until one of them ends it."""
        while True:
            try:
                state = self._look()
            except SlurmRefusedError as error:
                return self._end(Outcome.REFUSED, str(error))
            except SlurmError as error:
                outcome = Outcome.DONE if self._taken else Outcome.SILENT
                return self._end(outcome, str(error))
            if self._asked is not None and came_back(self._asked, state):
                return self._end(Outcome.DONE, "", state)
            decision = self._decide(state)
            if not decision.requeue:
                outcome = Outcome.REFUSED if decision.refused else Outcome.LEFT
                return self._end(outcome, decision.reason, state)
            if self._refusal is not None:
                return self._end(Outcome.REFUSED, str(self._refusal), state)
            if self._lost is not None and self._means.clock() > self._until:
                return self._end(Outcome.SILENT, str(self._lost), state)
            self._asked, self._reason = self._asked or state, decision.reason
            self._ask()

    def _look(self) -> JobState:
        """The job as it is. A moment is enough where Slurm has said that the requeue worked."""
        left = self._until - self._means.clock()
        within = min(left, VERIFY_WITHIN) if self._taken else left
        means = self._means
        return patiently(
            lambda: means.look(self._job), within, self._on_failure, means.clock, means.pause
        )

    def _ask(self) -> None:
        self._tries += 1
        try:
            self._means.requeue(self._job)
            self._taken = True
        except SlurmRefusedError as error:
            self._refusal = error  # of a second request, if an earlier one was carried out
            return
        except SlurmError as error:
            self._taken, self._lost = False, error
            self._on_failure(error)
            if isinstance(error, SlurmUnclearError) and self._tries >= UNCLEAR_TRIES:
                self._refusal = error
                return
        if self._tries > 1 or not self._taken:
            self._means.pause(next_pause(self._tries))

    def _end(self, outcome: Outcome, reason: str, state: JobState | None = None) -> PutBack:
        said = self._reason if outcome is Outcome.DONE else reason
        return PutBack(outcome, said, state or self._asked, self._asked)
