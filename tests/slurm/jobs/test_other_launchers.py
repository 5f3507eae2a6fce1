"""The scripts next to multinode.sh: warned or preempted, they come back as it does."""

from __future__ import annotations

import re

import psutil
import pytest
from harness import Run, drills, wait_until
from submitting import LONG, Project

pytestmark = pytest.mark.timeout(300)

SCRIPTS = {
    "singlenode.sh": ("--ntasks-per-node=2", "--gpus-per-node=2"),
    "torchrun.sh": ("--nodes=2",),
}
"""Two ranks with each: tasks of a node, and one worker of torchrun on each of two nodes."""


def start(project: Project, script: str, *overrides: str) -> str:
    """A job that has made five steps."""
    config = str(project.run.config.relative_to(project.folder))
    job = project.submit(script, config, *overrides, options=SCRIPTS[script])
    project.reach(job, 5)
    return job


def stopped_at(project: Project) -> int:
    """The step that the run was stopped after and resumed at, committed and none lost."""
    (stopped,) = project.events("stopped")
    committed = [e["step"] for e in project.events("checkpoint_committed")]
    assert stopped["step"] in committed
    assert stopped["lost_steps"] == 0
    return int(str(stopped["step"]))


def meet_at(project: Project) -> str:
    """The address with which torchrun on node2 was told to meet the other, and has."""
    pids = project.cluster.machines["node2"].processes()
    words = [word for pid in pids for word in psutil.Process(pid).cmdline()]
    (endpoint,) = {word for word in words if word.startswith("--rdzv-endpoint=")}
    address, _, port = endpoint.partition("=")[2].partition(":")
    connected = project.cluster.run("node2", "ss", "-Htn").stdout
    assert re.search(rf"{re.escape(address)}\]?:{port}$", connected, re.M), connected
    return address


@pytest.mark.every_slurm
@pytest.mark.parametrize("script", SCRIPTS)
def test_a_warned_job_comes_back(project: Project, undisturbed: Run, script: str) -> None:
    job = start(project, script, *LONG)
    if script == "torchrun.sh":
        assert meet_at(project) == project.cluster.address("node1", "ib0")
    project.cluster.run("login1", "scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: project.cluster.job(job)["Restarts"] == "1", "the job is requeued", 60)
    project.end(job)
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert f"resumed at step {stopped_at(project)}" in project.log(job)
    assert project.run.steps() == undisturbed.steps()


@pytest.mark.every_slurm
@pytest.mark.parametrize(
    ("script", "grace", "ended"),
    [
        *drills(
            ("singlenode.sh", 20, "REQUEUED"),  # by the supervisor, while the job still runs
            ("singlenode.sh", 0, "PREEMPTED"),  # by Slurm
            # The ranks are not signalled: the supervisor finds out by asking.
            ("torchrun.sh", 20, "REQUEUED"),
        ),
    ],
)
def test_a_preempted_job_comes_back(project: Project, script: str, grace: int, ended: str) -> None:
    """`make test` has it of multinode.sh: tests/slurm/stops/test_preemption.py."""
    project.cluster.configure(grace=grace)
    job = start(project, script, "--train.max_steps=400")
    preemptor = project.cluster.preempt(job, seconds=1)
    wait_until(lambda: project.cluster.job(job)["Restarts"] == "1", "the job is requeued", 90)
    project.cluster.wait_for(preemptor, "COMPLETED")
    step = stopped_at(project)
    project.reach(job, step + 1)
    project.assert_states(job, ended, "RUNNING")
    assert f"resumed at step {step}" in project.log(job)
