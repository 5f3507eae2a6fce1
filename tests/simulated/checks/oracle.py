"""What must hold in every simulated run, told apart from how kempner sees to it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import Enum
from itertools import takewhile

from kempner.cluster.slurm.job import JobState
from kempner.run.process.exit_codes import ExitCode
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import HEALED_BY_A_RESTART, MAX_REQUEUES_WITHOUT_PROGRESS


class Invariant(Enum):
    """The promises.

    A commit is *acknowledged* once `latest` names it. The *live branch* is the acknowledged commits
    in order, without those that a rollback left behind or that damage made a load pass over. What
    the model counts as damage are the bits that it flipped itself.
    """

    LOST = "no committed step is ever lost"
    """An attempt starts from the newest undamaged commit of the live branch, and from step 0 only
    if there is none; a rollback goes no farther back than was decided; retention deletes none of
    the newest `keep_last` commits that are there."""
    WRITERS = "at most one live attempt commits"
    """An attempt that names a checkpoint, moves `latest` or withdraws a commit is at that moment
    the last one that was begun. A check of the fence and the change right after it are one
    moment here: no file system ties two together."""
    TWICE = "no launch of a job is requeued twice"
    """No process of one launch of a job has Slurm requeue the next one."""
    REVIVED = "a cancelled job is never requeued"
    """After scancel no process of kempner asks Slurm to requeue that job. That Slurm is asked for
    the state and then to requeue are one moment, too."""
    ENDLESS = "every endless loop of restarts without progress ends"
    """Between acknowledged commits of two steps at most `budget` + 1 attempts of a job fail for
    loss of a node, and as many otherwise, and kempner itself brings about at most 2 x `budget` +
    `MAX_REQUEUES_WITHOUT_PROGRESS` + 2 launches of it (those of a person, of Slurm, and after a
    preemption not counted); at most `max_rollbacks` rollbacks are not followed by a commit beyond
    their trouble; a load comes to an end."""
    UNFINISHED = "every run that can finish does"
    """A run is complete only with its last step committed. It stops for good, or needs a person,
    only for a reason that the model knows of, and that holds for the launch that ended: it was
    cancelled, its job may not be requeued, Slurm refused a requeue, gave no answer until it had
    ended the job, or all nodes on which kempner had a process were lost; saves were made to fail,
    it has used up its budget or met the same exception at the same step, or it came back in vain. A
    person then starts it again. No save of the live attempt fails that was not made to. No attempt
    starts on a node that does not answer. At a time limit that is known, healthy ranks lose no
    step, once a save was measured and if saves are faster than their interval. With all faults
    over, it completes within the time that the whole run takes, some hangs, and the repair of
    nodes."""


class Violation(AssertionError):
    """An invariant that does not hold."""

    def __init__(self, invariant: Invariant, words: str) -> None:
        super().__init__(f"{invariant.value}: {words}")
        self.invariant = invariant


@dataclass(frozen=True)
class _Failure:
    """An attempt of a job that failed; `tip` is the step that was acknowledged last by then."""

    job: str
    step: int
    raised: str
    node_lost: bool
    tip: int | None


class Oracle:
    """Follows a run from outside and raises `Violation`."""

    def __init__(self, budget: int, keep_last: int, max_rollbacks: int) -> None:
        self._budget, self._keep_last, self._max_rollbacks = budget, keep_last, max_rollbacks
        self.current = 0
        """The number of the last attempt that was begun."""
        self.branch: list[int] = []
        self._present: set[int] = set()
        """Steps that retention has left."""
        self.damaged: set[int] = set()
        """Steps of the branch in which bits were flipped."""
        self._tip: int | None = None
        """The step that was acknowledged last."""
        self._failures: list[_Failure] = []
        self._known: dict[str, list[_Failure]] = {}
        """What each job's supervisor knew of them when its attempt began."""
        self._launches, self._requeues = Counter[str](), Counter[str]()
        self._troubles: list[int] = []
        """Where the loss was when it sent the run back."""
        self._troubles_of_others: list[int] = []
        """The same of attempts that did not own the run any more: those remember it, too."""
        self._failed_saves = 0
        self._back_to: int | None = None
        self._excuses: dict[str, str] = {}
        """Why a person is needed if a job ends, by jobs of which that is known."""
        self.excused = Counter[str]()
        """How often a person was needed, by reasons."""

    # Commits

    def named(self, actor: int, what: str) -> None:
        """Something that counts is changed on disk."""
        if actor != self.current:
            raise Violation(
                Invariant.WRITERS, f"attempt {actor} changes {what}, {self.current} is live"
            )

    def pointed(self, step: int) -> None:
        """`latest` names a step from now on."""
        if step in self.branch:
            self._drop_after(step)
            return
        if self.branch and step < self.branch[-1]:
            raise Violation(Invariant.LOST, f"step {step} is committed after {self.branch[-1]}")
        self.branch.append(step)
        self._present.add(step)
        self.damaged.discard(step)
        self._failed_saves = 0
        if step != self._tip:
            self._tip = step
            self._forget_launches()

    def restored(self, step: int | None) -> None:
        """An attempt starts from the checkpoint of this step; None for step 0."""
        self._back_to = None
        whole = [s for s in self.branch if s not in self.damaged]
        if step != (whole[-1] if whole else None):
            raise Violation(Invariant.LOST, f"resumes from {step} of {whole}")

    def going_back(self, actor: int, to: int) -> None:
        """An attempt is to roll back to a step. What one does that may commit nothing is idle."""
        if actor != self.current:
            return
        if to not in self.branch:
            raise Violation(Invariant.LOST, f"back to step {to}, which is none of {self.branch}")
        if self._in_vain() >= self._max_rollbacks:
            raise Violation(Invariant.ENDLESS, f"{self._in_vain() + 1} rollbacks in vain")
        self._back_to = to

    def went_back(self, actor: int, at: int) -> None:
        """An attempt has rolled back, from step `at`."""
        if actor == self.current:
            self._back_to = None
            self._troubles.append(at)
        else:
            self._troubles_of_others.append(at)

    def _in_vain(self, others: bool = False) -> int:
        """How many rollbacks were not followed by a commit beyond their trouble."""
        troubles = self._troubles + (self._troubles_of_others if others else [])
        return sum(1 for at in troubles if not self.branch or at >= self.branch[-1])

    def looked(self, tried: int, many: int) -> None:
        """A load looks at yet another checkpoint."""
        if tried > many:
            raise Violation(Invariant.ENDLESS, "a load finds the same damage again and again")

    def withdrawn(self, step: int) -> None:
        """Retention deletes a commit."""
        there = [s for s in self.branch if s in self._present]
        if step in there[-self._keep_last :]:
            raise Violation(Invariant.LOST, f"retention deletes {step} of {there}")
        self._present.discard(step)

    def _drop_after(self, step: int) -> None:
        dropped = [s for s in self.branch if s > step]
        planned = self._back_to is not None
        unplanned = [s for s in dropped if not planned or s <= (self._back_to or 0)]
        if lost := set(unplanned) - self.damaged:
            raise Violation(Invariant.LOST, f"`latest` goes back to {step} past {sorted(lost)}")
        self.branch = [s for s in self.branch if s <= step]

    # Launches

    def launched(self, job: str) -> None:
        """Slurm starts a job: what was known of its launch before counts no more."""
        self._excuses.pop(job, None)

    def began(self, job: str) -> None:
        """A supervisor begins an attempt, after a look at the ledger."""
        self._known[job] = list(self._failures)

    def failed(self, job: str, step: int, raised: str, node_lost: bool) -> None:
        """An attempt has failed, without a stop."""
        self._failures.append(_Failure(job, step, raised, node_lost, self._tip))

    def starting_again(self, job: str, gone: set[str]) -> None:
        """The supervisor starts the ranks again, also on the nodes that it found `gone`."""
        if gone:
            raise Violation(Invariant.UNFINISHED, f"starts again on {gone}, which do not answer")
        in_vain = takewhile(lambda f: f.tip == self._tip, reversed(self._failures))
        mine = [failure for failure in in_vain if failure.job == job]
        alike = [failure for failure in mine if failure.node_lost is mine[0].node_lost]
        if len(alike) > self._budget:
            raise Violation(Invariant.ENDLESS, f"failed {len(alike)} times, and starts again")
        self._launch(job)

    def requeued(self, job: str, cancelled: bool, preempted: bool) -> None:
        """kempner has asked Slurm to requeue the job."""
        if cancelled:
            raise Violation(Invariant.REVIVED, "a cancelled job goes back into the queue")
        if not preempted:
            self._requeues[job] += 1
            self._launch(job)

    def requeued_again(self, job: str) -> None:
        """A process of an earlier launch has asked Slurm to requeue the job."""
        raise Violation(Invariant.TWICE, f"job {job} is requeued for a launch that is over")

    def _forget_launches(self) -> None:
        self._launches.clear()
        self._requeues.clear()

    def _launch(self, job: str) -> None:
        self._launches[job] += 1
        if self._launches[job] > 2 * self._budget + MAX_REQUEUES_WITHOUT_PROGRESS + 2:
            raise Violation(Invariant.ENDLESS, f"{self._launches[job]} launches without a commit")

    # Ends

    def refused(self, job: str) -> None:
        """Slurm does not take the job back."""
        self._excuses[job] = "Slurm refuses"

    def superseded(self, job: str) -> None:
        """A save was refused by the fence."""
        self._excuses[job] = "another attempt owns the run"

    def save_failed(self) -> None:
        """A save could not be written, by a fault."""
        self._failed_saves += 1

    def save_refused(self, actor: int, words: str) -> None:
        """A save could not be written, and no fault was the reason."""
        if actor == self.current:
            raise Violation(Invariant.UNFINISHED, f"nothing keeps a save from it, but {words}")

    def gave_up(self, job: str, decision: Decision) -> None:
        """The supervisor does not start the ranks again after the failure that was told last."""
        if decision.code not in HEALED_BY_A_RESTART:
            self._failures = []
            return  # `parted` asks for the reason
        last = self._failures[-1]
        in_vain = takewhile(lambda f: f.tip == last.tip, reversed(self._known[job]))
        earlier = [failure for failure in in_vain if failure.node_lost is last.node_lost]
        again = any((f.step, f.raised) == (last.step, last.raised) for f in earlier)
        if len(earlier) < self._budget and not (last.raised and again):
            words = f"given up after {[last, *earlier]}, of {self._budget}"
            raise Violation(Invariant.UNFINISHED, words)
        self._excuses[job], self._failures = "given up", []
        self._forget_launches()

    def parted(self, job_id: str, decision: Decision, job: JobState | None) -> None:
        """The job is not put back into the queue."""
        match decision.code:
            case ExitCode.CHECKPOINT_FAILED if self._failed_saves:
                self._excuses[job_id] = "saves fail"
            case ExitCode.DIVERGED if (
                self._in_vain(others=True) >= self._max_rollbacks or not self.branch
            ):
                self._excuses[job_id] = "diverged"
            case ExitCode.BAD_DATA if self._back_to is not None:
                self._excuses[job_id] = "all that it could go back to is damaged"
            case _ if job is not None and (
                job.running and self._requeues[job_id] >= MAX_REQUEUES_WITHOUT_PROGRESS
            ):
                self._excuses[job_id] = "it came back in vain"

    def left_alone(self, job: str) -> None:
        """Its watchdog does not put the job back."""
        if self._requeues[job] >= MAX_REQUEUES_WITHOUT_PROGRESS:
            self._excuses[job] = "it came back in vain"

    def lost_at_limit(self, steps: int) -> None:
        """A job that is stopped because its time is over has steps that were not saved."""
        words = f"{steps} steps are lost at a time limit that was known"
        raise Violation(Invariant.UNFINISHED, words)

    def needs_person(self, job: str, known: str) -> None:
        """The run is in no queue, and not complete; `known` is what the model has done to its last
        job."""
        reason = known or self._excuses.get(job, "")
        if not reason:
            raise Violation(Invariant.UNFINISHED, "it has stopped for good, for no known reason")
        self.excused[reason] += 1
        self._forget_launches()

    def completed(self, max_steps: int) -> None:
        """The run says that it is complete."""
        if not self.branch or self.branch[-1] != max_steps:
            raise Violation(Invariant.UNFINISHED, f"complete with {self.branch} of {max_steps}")

    def never_completed(self, step: int) -> None:
        """All faults are long over."""
        raise Violation(Invariant.UNFINISHED, f"still at step {step} long after the last fault")
