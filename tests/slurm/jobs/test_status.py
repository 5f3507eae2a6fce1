"""`kempner status JOBID`: the run of a job, and three counts of its restarts that agree."""

from __future__ import annotations

import sys

import pytest
from harness import wait_until
from lab import Cluster
from submitting import Project

pytestmark = pytest.mark.timeout(300)


def status(project: Project, target: str) -> dict[str, str]:
    """What is shown about a run or a job, on the login machine and in the project's folder."""
    command = [sys.executable, "-m", "kempner", "status", target]
    shown = project.cluster.run("login1", *command, cwd=project.folder).stdout
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
    assert shown["latest checkpoint"] == str(stopped["step"])
    assert shown["step"] == f"{stopped['step']} of 4000"

    wait_until(lambda: len(project.events("attempt_started")) == 2, "it is back", 60)
    agreed = "the last launch 1, scontrol 1, sacct -D 1"  # the accounting hears of it last
    wait_until(lambda: status(project, job)["restarts"] == agreed, agreed)
