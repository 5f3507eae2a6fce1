"""When an agent puts the job of a supervisor that is gone back into the queue."""

from __future__ import annotations

import json
import threading
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from kempner.cluster.slurm.job import JobState, parse_job
from kempner.cluster.slurm.scontrol import SlurmAccess
from kempner.run.record.events import Requeued
from kempner.run.record.lease import RELEASED, Holder
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.agents import last_resort
from kempner.supervisor.launchers.agents.last_resort import ASKING, LastResort

RUNNING, LIMIT, SCRIPT_DIED = "RUNNING None", "COMPLETING TimeLimit", "COMPLETING JobLaunchFailure"
CANCELLED = "COMPLETING None"


class Slurm:
    """Takes the job back."""

    def __init__(self, shown: str) -> None:
        state, reason = shown.split()
        self.job = _job(state, reason)
        self.requeues = 0
        self.means = SlurmAccess(self.look, self.requeue)

    def look(self, job: str) -> JobState:
        return self.job

    def requeue(self, job: str) -> None:
        self.requeues += 1
        self.job = replace(self.job, restarts=self.job.restarts + 1, state="PENDING")


def _job(state: str, reason: str) -> JobState:
    fields = {"JobId": "7", "JobState": state, "Reason": reason, "Requeue": "1", "Restarts": "2"}
    return parse_job(fields)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    run = RunDirectory(tmp_path / "run")
    run.supervisors.mkdir(parents=True)
    return run


def owned(run: RunDirectory, restarts: int = 2, beat: str = "4") -> None:
    """By a supervisor on another machine that renews its lease no more."""
    holder = Holder("node1", "boot-a/1", 10, 500, "7", restarts, "now", lasts=0.1)
    whole = run.supervisors / "new"
    whole.write_text(f"{beat}\n{json.dumps(asdict(holder))}\n")
    whole.replace(run.supervisors / "1")


@pytest.mark.parametrize(
    ("shown", "ending", "goes_back"),
    [
        (RUNNING, False, True),  # the batch host is lost
        (RUNNING, True, False),  # the watchdog waits for the agents
        (SCRIPT_DIED, True, True),
        (LIMIT, True, True),
        (CANCELLED, True, False),
        (CANCELLED, False, False),
    ],
)
def test_an_agent_asks_where_no_other_process_does(
    run: RunDirectory, shown: str, ending: bool, goes_back: bool
) -> None:
    owned(run)
    slurm = Slurm(shown)
    agent = LastResort(run, 0, "7", 2, slurm.means)
    if ending:
        agent.begin("7", 3)
    agent.finish("7", 3)
    assert slurm.requeues == goes_back
    told = [(line["event"], line["attempt"]) for line in read_lines(run.ledger)]
    assert told == [("requeued", 3)] * goes_back


def test_a_supervisor_that_has_left_in_order_has_decided_what_becomes_of_its_job(
    run: RunDirectory,
) -> None:
    owned(run, beat=RELEASED)
    slurm = Slurm(SCRIPT_DIED)  # as Slurm calls any end with another code than 0
    agent = LastResort(run, 0, "7", 2, slurm.means)
    agent.begin("7", 3)
    agent.finish("7", 3)
    LastResort(run, 0, "7", 2, slurm.means).finish("7", 3)
    assert slurm.requeues == 0


def test_a_supervisor_that_is_only_out_of_reach_keeps_its_job(run: RunDirectory) -> None:
    owned(run)
    slurm, over = Slurm(RUNNING), threading.Event()

    def renew() -> None:
        beat = 5
        while not over.wait(0.001):
            owned(run, beat=str(beat := beat + 1))

    renewals = threading.Thread(target=renew)
    renewals.start()
    LastResort(run, 0, "7", 2, slurm.means).finish("7", 3)
    over.set()
    renewals.join()
    assert slurm.requeues == 0


def test_storage_that_hangs_keeps_no_agent(
    run: RunDirectory, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = threading.Event()

    def hang(folder: Path) -> None:
        over.wait()
        raise OSError

    monkeypatch.setattr(last_resort, "look", hang)
    monkeypatch.setattr(last_resort, "STORAGE_WITHIN", 0.1)
    slurm = Slurm(LIMIT)
    agent = LastResort(run, 0, "7", 2, slurm.means)
    agent.begin("7", 3)
    agent.finish("7", 3)
    assert slurm.requeues == 0
    over.set()


def test_a_launch_that_is_over_a_job_in_vain_and_a_distant_agent_ask_for_nothing(
    run: RunDirectory,
) -> None:
    slurm = Slurm(RUNNING)
    owned(run, restarts=3)
    LastResort(run, 0, "7", 2, slurm.means).finish("7", 3)
    owned(run)
    LastResort(run, ASKING, "7", 2, slurm.means).finish("7", 3)
    LastResort(run, 0, "7", 2, slurm.means).finish(None, 3)
    for _ in range(3):
        Ledger(run.ledger).record(Requeued(None, "7"), 3)
    LastResort(run, 0, "7", 2, slurm.means).finish("7", 3)
    assert slurm.requeues == 0
