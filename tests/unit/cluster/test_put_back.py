"""A job is requeued once, whatever becomes of the answers; and one that is cancelled never."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from random import Random

import pytest

from kempner.cluster.slurm.command import (
    SlurmError,
    SlurmRefusedError,
    SlurmSilentError,
    SlurmUnclearError,
)
from kempner.cluster.slurm.job import JobState, job_fields, parse_job
from kempner.cluster.slurm.scontrol import (
    PutBack,
    RequeueDecision,
    RequeueOutcome,
    SlurmAccess,
    put_back,
)

JOBS = json.loads((Path(__file__).with_name("slurm_data") / "jobs.json").read_text())
RUNNING = parse_job(job_fields(JOBS["running"]))
LOST, UNASKED = SlurmSilentError("timed out"), SlurmSilentError("unable to contact")


@dataclass
class FakeSlurm:
    """A controller with one job; `looks` and `requeues` say what becomes of each answer in turn.

    An answer that is LOST was carried out, one that is UNASKED was not; None is a good one.
    """

    looks: list[SlurmError | None] = field(default_factory=list)
    requeues: list[SlurmError | None] = field(default_factory=list)
    job: JobState = RUNNING
    now: float = 0.0
    carried_out: int = 0

    def look(self, job: str) -> JobState:
        self.now += 1.0
        error = self.looks.pop(0) if self.looks else None
        if error is not None:
            raise error
        return self.job

    def requeue(self, job: str) -> None:
        self.now += 1.0
        error = self.requeues.pop(0) if self.requeues else None
        if error is UNASKED or isinstance(error, SlurmRefusedError):
            raise error
        if not self.job.running:
            raise SlurmRefusedError("scontrol requeue", "Job is pending execution")
        self.carried_out += 1
        self.job = replace(self.job, state="COMPLETING", restarts=self.job.restarts + 1)
        if error is not None:
            raise error

    def wait(self, seconds: float) -> None:
        self.now += seconds

    def put_back(self, until: float = 500.0) -> PutBack:
        def decide(job: JobState) -> RequeueDecision:
            return RequeueDecision(job.running, "requeueing" if job.running else job.state)

        means = SlurmAccess(self.look, self.requeue, lambda: self.now, self.wait)
        return put_back("7", decide, until, means=means)


def test_a_job_is_put_back() -> None:
    slurm = FakeSlurm()
    end = slurm.put_back()
    assert (end.outcome, end.reason, slurm.carried_out) == (RequeueOutcome.DONE, "requeueing", 1)
    assert end.asked == RUNNING
    assert end.state == slurm.job


@pytest.mark.parametrize(
    "requeues", [[LOST], [UNASKED], [UNASKED, LOST], [UNASKED, UNASKED, UNASKED, None]]
)
def test_after_a_lost_answer_the_job_is_looked_at(requeues: list[SlurmError | None]) -> None:
    slurm = FakeSlurm(requeues=requeues)
    assert (slurm.put_back().outcome, slurm.carried_out) == (RequeueOutcome.DONE, 1)


@pytest.mark.parametrize("answer", [None, LOST])
def test_of_two_that_ask_at_once_slurm_takes_one(answer: SlurmError | None) -> None:
    """Each has seen the job run when it asks."""
    slurm, ends = FakeSlurm(requeues=[answer]), list[PutBack]()

    class Second(FakeSlurm):
        """Another process asks between this one's look and its request."""

        def requeue(self, job: str) -> None:
            if not ends:
                ends.append(slurm.put_back())
                self.job = slurm.job
            super().requeue(job)

    ends.append(Second().put_back())
    assert [end.outcome for end in ends] == [RequeueOutcome.DONE] * 2
    assert [end.by_another for end in ends] == [False, True]


def test_a_controller_that_is_away_for_minutes_is_waited_for() -> None:
    slurm = FakeSlurm(looks=[None, *[UNASKED] * 20], requeues=[UNASKED])
    assert slurm.put_back().outcome is RequeueOutcome.DONE
    assert slurm.now > 180
    silent = FakeSlurm(looks=[UNASKED] * 200)
    assert (silent.put_back().outcome, silent.carried_out) == (RequeueOutcome.SILENT, 0)
    assert 480 <= silent.now <= 520
    deaf = FakeSlurm(requeues=[UNASKED] * 200)
    assert (deaf.put_back().outcome, deaf.carried_out) == (RequeueOutcome.SILENT, 0)


def test_an_exit_code_that_lies_is_found_out() -> None:
    """Neither a requeue that says it worked nor one that says it did not is believed."""

    class Lying(FakeSlurm):
        def requeue(self, job: str) -> None:
            self.now += 1.0
            if not self.requeues:
                super().requeue(job)
            else:
                self.requeues.pop()

    lying = Lying(requeues=[None, None])
    assert (lying.put_back().outcome, lying.carried_out) == (RequeueOutcome.DONE, 1)
    denied = SlurmUnclearError("exit code 1")
    slurm = FakeSlurm(requeues=[denied])
    assert (slurm.put_back().outcome, slurm.carried_out) == (RequeueOutcome.DONE, 1)


@pytest.mark.parametrize("state", ["COMPLETING", "CANCELLED", "TIMEOUT", "FAILED"])
@pytest.mark.parametrize("requeues", [[], [UNASKED]])
def test_a_job_that_ends_meanwhile_is_never_revived(
    state: str, requeues: list[SlurmError | None]
) -> None:
    slurm = FakeSlurm(requeues=[*requeues])

    def cancel(seconds: float) -> None:
        slurm.now += seconds
        slurm.job = replace(slurm.job, state=state)

    slurm.wait = cancel  # type: ignore[method-assign]
    slurm.looks = [] if requeues else [UNASKED]
    end = slurm.put_back()
    assert (end.outcome, end.reason, slurm.carried_out) == (RequeueOutcome.LEFT, state, 0)


def test_what_is_refused_is_not_asked_again_and_unclear_words_not_for_ever() -> None:
    slurm = FakeSlurm(requeues=[SlurmRefusedError("scontrol requeue 7", "denied")] * 9)
    end = slurm.put_back()
    assert (end.outcome, len(slurm.requeues)) == (RequeueOutcome.REFUSED, 8)
    assert end.reason == "`scontrol requeue 7` was refused: denied"
    gone = FakeSlurm(looks=[SlurmRefusedError("scontrol show job", "Invalid job id specified")])
    assert gone.put_back().outcome is RequeueOutcome.REFUSED

    class Odd(FakeSlurm):
        def requeue(self, job: str) -> None:
            self.requeues.append(None)
            raise SlurmUnclearError("it is Sunday")

    odd = Odd()
    assert (odd.put_back().outcome, len(odd.requeues)) == (RequeueOutcome.REFUSED, 4)


def test_whatever_goes_wrong_for_a_while_it_is_requeued_exactly_once() -> None:
    kinds = (None, LOST, UNASKED)
    for seed in range(2000):
        chance = Random(seed)
        faults = [[chance.choice(kinds) for _ in range(chance.randrange(12))] for _ in range(2)]
        slurm = FakeSlurm(looks=faults[0], requeues=faults[1])
        assert (slurm.put_back().outcome, slurm.carried_out) == (RequeueOutcome.DONE, 1), seed
    for looks, requeues in product(product(kinds, repeat=3), repeat=2):
        slurm = FakeSlurm(looks=[*looks], requeues=[*requeues])
        assert (slurm.put_back().outcome, slurm.carried_out) == (RequeueOutcome.DONE, 1)
