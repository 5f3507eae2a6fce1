"""When ranks whose supervisor is gone put the job back into the queue."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from kempner.cluster.slurm.command import SlurmError, SlurmRefusedError
from kempner.cluster.slurm.job import JobState, parse_job
from kempner.cluster.slurm.scontrol import SlurmAccess, decide_orphan_requeue
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.events import CheckpointCommitted, Requeued
from kempner.run.record.lease import RELEASED, Holder, LeaseReading
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.training.rank_link import rank_link
from kempner.training.rank_link.rank_link import (
    SupervisorWatch,
    Watched,
    hand_back,
    has_died,
)


def job(state: str, reason: str, may_requeue: str = "1", restarts: str = "2") -> JobState:
    fields = {"JobId": "7", "JobState": state, "Reason": reason, "Requeue": may_requeue}
    return parse_job({**fields, "Restarts": restarts})


@pytest.mark.parametrize(
    ("state", "superseded", "requeue", "words"),
    [
        (job("RUNNING", "None"), False, True, "requeueing the job"),
        (job("SIGNALING", "None"), False, True, "requeueing the job"),
        (job("RUNNING", "None", may_requeue="0"), False, False, "--no-requeue"),
        (job("COMPLETING", "None"), False, False, "is COMPLETING"),  # cancelled
        (job("COMPLETING", "TimeLimit"), False, True, "requeueing the job"),
        (job("TIMEOUT", "TimeLimit"), False, False, "is TIMEOUT"),
        (job("COMPLETING", "JobLaunchFailure"), False, True, "requeueing the job"),
        (job("COMPLETING", "RaisedSignal:9(Killed)"), False, True, "requeueing the job"),
        (job("FAILED", "NonZeroExitCode"), False, True, "requeueing the job"),
        (job("CANCELLED", "None"), False, False, "is CANCELLED"),
        (job("PENDING", "None", restarts="3"), False, False, "started again in the meantime"),
        (job("RUNNING", "None", restarts="3"), False, False, "started again in the meantime"),
        (job("RUNNING", "None"), True, False, "newer attempt"),
    ],
)
def test_only_a_job_that_lost_its_supervisor_is_requeued(
    state: JobState, superseded: bool, requeue: bool, words: str
) -> None:
    verdict = decide_orphan_requeue(state, restarts=2, superseded=superseded)
    assert verdict.requeue is requeue
    assert words in verdict.reason


class Slurm:
    """A controller that is away at first, and loses its first answer to a requeue."""

    def __init__(self, away: int, meanwhile: Callable[[], object] = lambda: None) -> None:
        self.away, self.meanwhile = away, meanwhile
        self.asked: list[str] = []
        self.job = job("RUNNING", "None", restarts="0")
        self.now = 0.0
        self.means = SlurmAccess(self.look, self.requeue, lambda: self.now, self.pause)

    def pause(self, seconds: float) -> None:
        self.now += seconds

    def look(self, job: str) -> JobState:
        self.asked.append("look")
        self.away -= 1
        if self.away == 0:
            self.meanwhile()
        if self.away >= 0:
            raise SlurmError("Unable to contact slurm controller")
        return self.job

    def requeue(self, job: str) -> None:
        self.asked.append("requeue")
        self.job = replace(self.job, restarts=self.job.restarts + 1, state="PENDING")
        raise SlurmError("Zero Bytes were transmitted or received")


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path / "run")


def test_a_slurm_that_is_away_is_asked_again_and_the_job_goes_back_once(run: RunDirectory) -> None:
    attempt, slurm = begin_attempt(run), Slurm(away=5)
    hand_back("7", run, attempt, 0, slurm.means)
    assert slurm.asked == [*["look"] * 6, "requeue", "look"]
    (told,) = read_lines(run.ledger)
    assert (told["event"], told["by_rank"], told["restarts"]) == ("requeued", 0, 0)
    hand_back("7", run, attempt, 1, slurm.means)  # at once: rank 0 has said that it does it
    assert slurm.asked.count("requeue") == 1


def test_a_job_whose_run_has_gone_on_is_left_alone(run: RunDirectory) -> None:
    attempt = begin_attempt(run)
    slurm = Slurm(away=3, meanwhile=lambda: begin_attempt(run))
    hand_back("7", run, attempt, 0, slurm.means)
    assert slurm.asked == ["look"] * 4
    assert list(read_lines(run.ledger)) == []


def test_a_job_that_loses_its_supervisor_again_and_again_is_given_up(run: RunDirectory) -> None:
    ledger = Ledger(run.ledger)
    for saved, back in ((10, True), (10, False), (20, True)):
        attempt, slurm = begin_attempt(run), Slurm(away=0)
        ledger.record(CheckpointCommitted(saved), attempt.number)
        hand_back("7", run, attempt, 0, slurm.means)
        assert ("requeue" in slurm.asked) is back


def test_a_supervisors_own_requeue_is_no_loss_of_a_supervisor(run: RunDirectory) -> None:
    """It requeued the job at step 10, was lost at once when that came back, and nothing is new."""
    ledger = Ledger(run.ledger)
    attempt, slurm = begin_attempt(run), Slurm(away=0)
    ledger.record(CheckpointCommitted(10), attempt.number)
    ledger.record(Requeued(step=10, job="7"), attempt.number)
    hand_back("7", run, begin_attempt(run), 0, slurm.means)
    assert "requeue" in slurm.asked


def test_storage_that_cannot_keep_a_claim_keeps_no_job_from_its_requeue(run: RunDirectory) -> None:
    attempt, slurm = begin_attempt(run), Slurm(away=0)
    shutil.rmtree(run.attempt(attempt.number))
    hand_back("7", run, attempt, 0, slurm.means)
    assert slurm.asked.count("requeue") == 1


def test_only_a_job_that_did_not_go_back_is_to_be_submitted_again(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    quiet = SimpleNamespace(warning=told.append, info=lambda *_, **__: None)
    monkeypatch.setattr(rank_link, "logger", lambda: quiet)

    def refuse(job: str) -> JobState:
        raise SlurmRefusedError("scontrol show job 7", "Invalid job id specified")

    slurm = Slurm(away=0)
    for means in (slurm.means, replace(slurm.means, look=refuse)):
        hand_back("7", run, begin_attempt(run), 0, means)
    assert told == [
        "the supervisor is gone: requeueing the job",
        "`scontrol show job 7` was refused: Invalid job id specified; submit the same command "
        "again to continue",
    ]


HOLDER = Holder("node1", "boot-a/1", 10, 500, "7", 0, "now", lasts=45.0)


@pytest.mark.parametrize(
    ("seen", "seconds", "lives", "died"),
    [
        (LeaseReading(1, HOLDER, "4"), 0.0, False, True),
        (LeaseReading(1, HOLDER, "4"), 1000.0, True, False),  # storage that hangs, say
        (
            LeaseReading(1, HOLDER, RELEASED),
            1000.0,
            False,
            False,
        ),  # it has decided what becomes of the job
        (LeaseReading(1, replace(HOLDER, machine="boot-b/1"), "4"), 7.0, False, False),
        (LeaseReading(1, replace(HOLDER, machine="boot-b/1"), "4"), 8.0, False, True),
        (LeaseReading(1, None, ""), 1000.0, False, False),
    ],
)
def test_a_supervisor_that_no_longer_renews_its_lease_has_died(
    seen: LeaseReading, seconds: float, lives: bool, died: bool
) -> None:
    assert has_died(Watched(seen, 100.0), 100.0 + seconds, "boot-a/1", lives) is died


def test_the_lease_is_looked_at_from_time_to_time_and_what_has_died_stays_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hundreds of ranks ask again and again."""
    at = SimpleNamespace(now=0.0, beat="4", looks=0)

    def look(folder: Path) -> LeaseReading:
        at.looks += 1
        return LeaseReading(1, replace(HOLDER, machine="boot-b/1"), at.beat)

    monkeypatch.setattr(rank_link, "look", look)
    monkeypatch.setattr(rank_link, "AwakeClock", lambda: SimpleNamespace(now=lambda: at.now))
    watch, found = SupervisorWatch(tmp_path), []
    for now, beat in ((0.0, "4"), (0.4, "4"), (0.5, "4"), (8.0, "4"), (9.0, "5")):
        at.now, at.beat = now, beat
        found.append((watch.died(), at.looks))
    assert found == [(False, 1), (False, 1), (False, 2), (True, 3), (True, 3)]
