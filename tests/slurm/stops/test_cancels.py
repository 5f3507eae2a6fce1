"""Who cancels, requeues, suspends or signals a job gets what was asked for, and no step is lost."""

from __future__ import annotations

import time

import pytest
from harness import Run, assert_named, wait_until
from patience import slowed
from submitting import LONG, Project, assert_like

from kempner.lab.slurm_conf import KILL_WAIT
from kempner.run.process.exit_codes import StopReason

pytestmark = pytest.mark.timeout(400)


def committed_all(project: Project) -> bool:
    """Whether the newest commit is the last step that was made."""
    return project.run.latest() == max(project.run.steps())


@pytest.mark.every_slurm
def test_an_operators_word_holds(project: Project, undisturbed: Run) -> None:
    """Suspended, requeued and cancelled by an operator; then submitted again."""
    project.slow()
    # Every patience is shorter than the suspension.
    job = project.train(
        *LONG, f"--supervise.supervisor_timeout={slowed(10)}", "--supervise.crash_grace=1"
    )
    project.reach(job, 3)
    project.cluster.scontrol("suspend", job)
    project.cluster.wait_for(job, "SUSPENDED")
    until = time.monotonic() + slowed(12)
    wait_until(lambda: time.monotonic() > until, "the suspension is long", interval=0.1)
    made = max(project.run.steps())
    project.cluster.scontrol("resume", job)
    project.reach(job, made + 3)
    assert project.run.attempt() == 1
    assert not project.events("stop_requested")

    project.cluster.scontrol("requeue", job)
    project.attempt(job, 2)
    assert committed_all(project)
    assert_named(project.run.record, StopReason.REQUEUE, 1, 2, project.log(job))
    (asked,) = project.events("stop_requested")  # not as a signal with minutes left
    assert (asked["reason"], asked["seconds_left"] <= 30) == ("requeue", True)
    assert "put back into the queue, by an operator" in asked["sentence"]
    project.reach(job, project.run.latest() + 2)

    cancelled_at = time.time()
    project.cluster.run("login1", "scancel", job)
    project.end(job, "CANCELLED")
    assert committed_all(project)
    last = project.events("checkpoint_committed")[-1]
    assert last["time"] - cancelled_at < KILL_WAIT
    project.assert_states(job, "REQUEUED", "CANCELLED")
    assert "the job was cancelled: submit it again" in project.log(job)
    assert_named(project.run.record, StopReason.CANCEL, 2, 2, project.log(job))

    again = project.train(*LONG, options=("--no-requeue",))
    project.attempt(again, 3)
    project.reach(again, project.run.latest() + 2)
    project.warn(again)
    project.end(again, "FAILED")
    assert project.cluster.job(again)["ExitCode"] == "75:0"
    assert "submitted with --no-requeue; submit the same command again to continue" in project.log(
        again
    )
    assert committed_all(project)
    assert_named(project.run.record, StopReason.OPERATOR, 3, 2, project.log(again))
    assert not project.events("requeued")

    project.hurry()
    project.end(project.train(*LONG))
    assert_like(project.run, undisturbed)
