"""`kempner status` from the login node: whatever is done to a run, it says so at once."""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import pytest
from harness import wait_until
from lab import Cluster
from submitting import Project

pytestmark = pytest.mark.timeout(600)


def call(project: Project, *arguments: str) -> str:
    """What a command of kempner's prints on the login machine, in the project's folder."""
    command = [sys.executable, "-m", "kempner", *arguments]
    return project.cluster.run("login1", *command, cwd=project.folder).stdout


def status(project: Project, target: str) -> dict[str, str]:
    """What is shown about a run or a job."""
    shown = call(project, "status", target)
    return {line[:18].strip(): line[19:] for line in shown.splitlines()}


def test_a_job_is_followed_by_its_id(project: Project, cluster: Cluster) -> None:
    job = project.train("--train.max_steps=4000")
    project.reach(job, 5)
    shown = status(project, job)
    assert shown["run"] == str(project.run.record.path)
    assert shown["job"] == f"{job} RUNNING node[1-2]"
    assert shown["restarts"] == "the last launch 0, scontrol 0, sacct -D 0"
    assert int(shown["step"].split()[0]) >= 5

    cluster.scontrol("update", "partitionname=low", "state=down")  # or it may start again first
    try:
        cluster.run("login1", "scancel", "--batch", "--signal=TERM", job)
        cluster.wait_for(job, "PENDING")
        shown = status(project, job)
    finally:
        cluster.scontrol("update", "partitionname=low", "state=up")
    (stopped,) = project.events("stopped")
    assert shown["job"] == f"{job} PENDING"
    assert shown["latest checkpoint"].startswith(f"{stopped['step']}, ")
    assert shown["state"].startswith("queued (")
    assert shown["step"] == f"{stopped['step']} of 4000"

    wait_until(lambda: len(project.events("attempt_started")) == 2, "it is back", 60)
    agreed = "the last launch 1, scontrol 1, sacct -D 1"  # the accounting hears of it last
    wait_until(lambda: status(project, job)["restarts"] == agreed, agreed)


@dataclass
class Onlooker:
    """Somebody on the login node who asks about a run again and again."""

    project: Project
    job: str

    def look(self) -> dict[str, Any]:
        target = str(self.project.run.record.path)
        (told,) = json.loads(call(self.project, "status", target, "--json"))
        found: dict[str, Any] = told
        return found

    def sees(self, what: str, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        last: dict[str, Any] = {}

        def seen() -> bool:
            last.update(self.look())
            return condition(last)

        try:
            self.project.wait_until(self.job, seen, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{json.dumps(last, indent=1)}") from None
        return last

    def sees_training(self, attempt: int) -> dict[str, Any]:
        """Steps are made in this attempt; on the way there it never seems to be over."""

        def trains(told: dict[str, Any]) -> bool:
            assert told["state"] not in ("failed", "given up", "ended without a message"), told
            return told["state"] == "training" and told["attempt"]["number"] == attempt

        return self.sees(f"training in attempt {attempt}", trains)

    def sees_return_into_the_queue(self) -> None:
        self.sees("queued", lambda told: told["state"] == "queued")


PATIENCE = ("--resilience.hang_timeout_min=15", "--resilience.hang_timeout_max=15")
NEAR = 2.0
"""Seconds that two clocks of one machine, and who reads them, may be apart."""


def test_status_agrees_with_what_is_done_to_a_run(project: Project, cluster: Cluster) -> None:
    """And the report, at the end, tells the same story, with the seconds that each of it took."""
    cluster.scontrol("update", "partitionname=low", "state=down")
    try:
        job = project.train("--train.max_steps=400", *PATIENCE, options=("--time=60",))
        (told,) = json.loads(call(project, "status", job, "--json"))
        assert (told["run"], told["state"]) == (None, "queued")
        assert told["reason"].startswith("PartitionDown")
    finally:
        cluster.scontrol("update", "partitionname=low", "state=up")
    project.slow(rate="16mbit")
    login = Onlooker(project, job)
    project.wait_until(job, project.run.record.ledger.is_file, "the ledger")
    told = login.sees_training(1)
    assert (told["interruptions"], told["job"]["state"]) == ([], "RUNNING")
    project.reach(job, 12)
    project.wait_until(job, project.run.committed, "a checkpoint")
    before, committed = max(project.run.steps()), project.run.committed()[-1]
    told = login.look()
    assert before <= told["step"] <= max(project.run.steps())
    assert committed <= told["checkpoint"]["step"] <= project.run.committed()[-1]
    assert told["total_steps"] == 400
    assert told["deadline"]["time"] == told["job"]["ends_at"]
    assert sum(group["count"] for group in told["ranks"]) == 2

    killed_at = time.time()
    project.signal_ranks("node2", signal.SIGKILL)
    (killed,) = login.sees_training(2)["interruptions"]
    assert (killed["cause"], killed["rank"]) == ("rank 1 was killed by SIGKILL", 1)

    project.reach(job, max(project.run.steps()) + 8)
    cut_at = time.time()
    cluster.cut("node2", "ib0", "silent")
    told = login.sees("that nothing moves", lambda told: told["reason"].startswith("no step for"))
    assert told["state"] == "training"
    project.wait_until(job, lambda: project.events("hang"), "the hang is noticed")
    cluster.heal("node2", "ib0")
    project.slow(rate="16mbit")
    _, hung = login.sees_training(3)["interruptions"]
    assert (hung["kind"], hung["attempt"]) == ("hang", 2)

    project.reach(job, max(project.run.steps()) + 8)
    cluster.configure(grace=20)
    preemptor = cluster.preempt(job, seconds=4)
    told = login.sees("the stop", lambda told: told["state"] in ("stopping", "queued"))
    assert "preempt" in told["reason"] or told["state"] == "queued"
    login.sees_return_into_the_queue()
    cluster.wait_for(preemptor, "COMPLETED")
    told = login.sees_training(4)
    assert told["interruptions"][-1]["cause"] == "stopped: preemption"
    assert told["job"]["restarts"] == {"launch": 1, "controller": 1, "accounting": None}

    cluster.scontrol("update", f"jobid={job}", "TimeLimit=1")
    told = login.sees("the stop", lambda told: told["state"] in ("stopping", "queued"))
    assert "time limit" in told["reason"] or told["state"] == "queued"
    login.sees_return_into_the_queue()
    cluster.scontrol("update", f"jobid={job}", "TimeLimit=60")
    told = login.sees_training(5)
    assert told["interruptions"][-1]["cause"] == "stopped: time limit"
    login.sees("that there is time enough", lambda told: told["done_before_job_ends"] is True)

    project.hurry()
    project.end(job)
    told = login.look()
    assert (told["state"], told["step"], told["alive"]) == ("completed", 400, False)

    target = str(project.run.record.path)
    (report,) = json.loads(call(project, "report", target, "--json"))
    found = report["interruptions"]
    assert [(one["kind"], one["cause"]) for one in found] == [
        (one["kind"], one["cause"]) for one in told["interruptions"]
    ]
    assert abs(found[0]["time"] - killed_at) < NEAR
    (noticed,) = project.events("hang")
    assert abs(found[1]["cost"]["hung_seconds"] - (noticed["time"] - cut_at)) < NEAR
    spent = report["time"]
    wall = spent["end"] - spent["begin"]
    assert spent["seconds"]["unaccounted"] <= 0.01 * wall
    assert sum(spent["seconds"].values()) == pytest.approx(wall)
    begun = [event["time"] for event in project.events("attempt_started")]
    away = [
        again - left for left, again in zip(launches_ended(cluster, job), begun[3:], strict=True)
    ]
    assert spent["seconds"]["queue"] == pytest.approx(sum(away), abs=2 * NEAR, rel=0.05)


def launches_ended(cluster: Cluster, job: str) -> list[float]:
    """When each launch of a job but the last one ended, by Slurm's accounting, oldest first."""
    rows = cluster.sacct(job, "JobID", "State", "End", duplicates=True)
    whole = [row for row in rows if row["JobID"] == job and row["State"] != "RESIZING"]
    return [datetime.fromisoformat(row["End"]).timestamp() for row in whole[:-1]]
