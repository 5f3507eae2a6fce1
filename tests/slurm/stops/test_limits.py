"""A job that reaches its time limit comes back and goes on, whether or not it was warned."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Run, assert_named
from lab import Cluster
from submitting import LONG, Project, assert_like

from kempner.run.process.exit_codes import StopReason

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def unwarned(cluster: Cluster, tmp_path: Path, corpus: Path) -> Project:
    """A project whose script does not ask for a warning."""
    project = Project.make(cluster, tmp_path / "unwarned", corpus)
    script = project.folder / "scripts/slurm/multinode.sh"
    lines = script.read_text().splitlines(keepends=True)
    kept = [line for line in lines if "--signal" not in line]
    assert len(kept) == len(lines) - 1
    script.write_text("".join(kept))
    return project


def assert_came_back_once(project: Project, job: str) -> None:
    """Stopped on one step by all ranks, requeued at once, resumed at the next."""
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert "Restart cnt: 0" in project.log(job)
    assert "Restart cnt: 1" in project.log(job)
    (requeued,), (resumed,) = project.events("requeued"), project.events("resumed")
    stopped, completed = project.events("stopped"), project.events("completed")
    assert [event["step"] for event in stopped] == [requeued["step"]] == [resumed["step"]]
    assert (stopped[0]["lost_steps"], len(completed)) == (0, 1)
    first_steps = {line["attempt"]: line["step"] for line in reversed(list(project.run.metrics()))}
    assert first_steps == {1: 1, 2: requeued["step"] + 1}


@pytest.mark.every_slurm
def test_the_time_limit_costs_nothing(
    project: Project, unwarned: Project, undisturbed: Run
) -> None:
    """Both at the same time, because a limit is two minutes at least."""
    project.slow(*project.cluster.options.node_names[:4])
    warned = project.train(*LONG, options=("--time=2", "--signal=B:SIGTERM@50"))
    silent = unwarned.train(*LONG, options=("--time=2",))
    for side, job in ((project, warned), (unwarned, silent)):
        side.wait_until(job, lambda s=side: s.events("requeued"), "return into the queue", 180)
        project.cluster.wait_for(job, "PENDING")
        # Its second life is slow, too, until the other job has come back: no limit there.
        project.cluster.scontrol("update", f"jobid={job}", "TimeLimit=60")
    project.hurry()
    for side, job, reason in (
        (project, warned, StopReason.TIME_LIMIT),
        (unwarned, silent, StopReason.DEADLINE),
    ):
        side.attempt(job, 2)
        side.end(job)
        assert_came_back_once(side, job)
        assert_like(side.run, undisturbed)
        said = [event["reason"] for event in side.events("stop_requested")]
        assert said == [reason.label]
        assert_named(side.run.record, reason, 1, 2, side.log(job))
    asked = [event["sentence"] for event in project.events("stop_requested")]
    assert asked == ["Slurm sent a warning"]
    (asked_alone,) = unwarned.events("stop_requested")
    assert "left of the job's time" in asked_alone["sentence"]


AT_ITS_LIMIT = """#!/bin/bash
[ -n "$SLURM_RESTART_COUNT" ] && exit 0
trap 'scancel -v "$SLURM_JOB_ID" 2>> "$1"; scontrol requeue "$SLURM_JOB_ID"' TERM
while true; do sleep 1; done
"""
"""Asks for its end, and for its requeue, only once its time is over."""


@pytest.mark.every_slurm
def test_slurm_takes_a_job_back_at_its_time_limit_until_it_kills_it(
    cluster: Cluster, tmp_path: Path
) -> None:
    """What kempner relies on in need: a limit that was moved, a controller that was away. No person
    can have cancelled the job meanwhile."""
    script, said = tmp_path / "at_its_limit.sh", tmp_path / "said.txt"
    script.write_text(AT_ITS_LIMIT)
    job = cluster.sbatch("--time=1", "--requeue", "--output=/dev/null", str(script), str(said))
    assert cluster.wait_for(job, "COMPLETED", "TIMEOUT", "FAILED", deadline=240) == "COMPLETED"
    assert cluster.job(job)["Restarts"] == "1"
    assert "already completing" in said.read_text()
