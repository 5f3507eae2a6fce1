"""`kempner status` from the login node: whatever is done to a run, it says so at once."""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from harness import wait_until
from lab import Cluster
from patience import scaled, slowed
from stalling import missing, stalling_storage
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
    job = project.train("--train.max_steps=100000")
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
    assert shown["step"] == f"{stopped['step']} of 100000"

    wait_until(lambda: len(project.events("attempt_started")) == 2, "it is back", 60)
    agreed = "the last launch 1, scontrol 1, sacct -D 1"  # the accounting hears of it last
    wait_until(lambda: status(project, job)["restarts"] == agreed, agreed)


@dataclass
class Onlooker:
    """A user on the login node who asks about a run again and again."""

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


HANG = slowed(25.0, most=45.0)
"""Seconds: long enough to be looked at meanwhile, and shorter than a rank may be cut off."""

PATIENCE = (
    f"--resilience.hang_timeout_min={HANG}",
    f"--resilience.hang_timeout_max={HANG}",
    f"--resilience.hang_timeout_max_of.start={slowed(120)}",
)
NEAR = scaled(2.0)
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
    nodes = cluster.options.node_names  # a requeue may choose others, and must not be over too soon
    project.slow(*nodes, rate="16mbit")
    login = Onlooker(project, job)
    project.wait_until(job, project.run.record.ledger.is_file, "the ledger")
    told = login.sees_training(1)
    assert (told["interruptions"], told["job"]["state"]) == ([], "RUNNING")
    project.reach(job, 12)
    login.sees("a checkpoint", lambda told: told["checkpoint"] is not None)
    before, committed = max(project.run.steps()), project.run.latest()
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
    told = login.sees("that nothing moves", lambda told: "no step for" in told["reason"])
    assert told["state"] in ("training", "saving")  # a save may have been under way
    project.wait_until(job, lambda: project.events("hang"), "the hang is noticed")
    cluster.heal("node2", "ib0")
    project.slow(*nodes, rate="16mbit")
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
    times = int(cluster.job(job)["Restarts"])  # on a busy machine it may be preempted twice
    assert times >= 1
    assert told["job"]["restarts"] == {"launch": times, "controller": times, "accounting": None}

    # Slurm warns 120 s before the end, or up to a minute earlier: long before the supervisor would
    # have to stop by itself.
    project.end_in_minutes(job, 2)
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
    queued = times_in_queue(cluster, job)
    # After the hang, too: a node that is cut off is left out by a requeue.
    away = [one["cost"]["away_seconds"] for one in found if one["cost"]["away_seconds"]]
    assert away == pytest.approx(queued, abs=NEAR, rel=0.05)
    assert spent["seconds"]["queue"] == pytest.approx(sum(queued), abs=NEAR, rel=0.05)


def test_storage_that_stalls_under_the_nodes_is_told_while_and_after(
    project: Project, cluster: Cluster, tmp_path: Path
) -> None:
    if reason := missing():
        pytest.skip(reason)
    place, machines = project.run.checkpoints, ("login1", "node1", "node2")
    with stalling_storage(cluster, place, machines, tmp_path / "disk") as storage:
        job = project.train("--train.max_steps=100000", "--checkpoint.interval=2")
        login = Onlooker(project, job)
        project.wait_until(job, project.run.record.ledger.is_file, "the ledger")
        login.sees_training(1)
        project.wait_until(job, lambda: len(project.events("checkpoint_committed")) > 5, "saves")
        storage.stall()
        stands_still = lambda told: told["waits_for"].startswith("storage: the files of a")  # noqa: E731
        told = login.sees("that it waits for storage", stands_still)
        assert (told["state"], told["alive"]) == ("saving", True)
        assert told["reason"].startswith("all ranks: no step for ")
        assert told["step"] == max(project.run.steps())
        stall = storage.go_on()
        project.reach(job, told["step"] + 20)
        told = login.sees_training(1)
        assert (told["waits_for"], told["interruptions"]) == ("", [])
        cluster.run("login1", "scancel", job)
        project.end(job, "CANCELLED")
    (report,) = json.loads(call(project, "report", str(project.run.record.path), "--json"))
    spent = report["time"]
    assert spent["seconds"]["storage"] == pytest.approx(stall.seconds, abs=NEAR, rel=0.05)
    assert spent["seconds"]["unaccounted"] <= 0.01 * (spent["end"] - spent["begin"])
    assert [one["kind"] for one in report["interruptions"]] == ["stop"]


def times_in_queue(cluster: Cluster, job: str) -> list[float]:
    """Seconds from each requeue of a job to its next start, by the controller's log: accounting
    knows whole seconds only."""
    told = (cluster.folder / "log" / "slurmctld.log").read_text()
    moved = re.findall(rf"^\[(\S+)\] .*(Requeuing|Allocate|Started) JobId={job}\b", told, re.M)
    times = [
        (what == "Requeuing", datetime.fromisoformat(time).timestamp()) for time, what in moved
    ]
    return [started - left for (requeued, left), (_, started) in pairwise(times) if requeued]
