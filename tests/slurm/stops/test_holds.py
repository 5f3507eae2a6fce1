"""States of a job between running and its end: stopped, held, and what an expedited one becomes."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest
from lab import Cluster
from submitting import STEPS, Project

from kempner.run.process.exit_codes import RunError
from kempner.supervisor.slurm.job_monitor import LOOK_EVERY

pytestmark = pytest.mark.timeout(400)

HELD = "Slurm does not start it again until it is released"


def status(project: Project, job: str) -> str:
    command = [sys.executable, "-m", "kempner", "status", job]
    return project.cluster.run("login1", *command, cwd=project.folder).stdout


def _run_time(project: Project, job: str) -> int:
    """Seconds for which a job runs, of less than an hour."""
    _, minutes, seconds = project.cluster.job(job)["RunTime"].split(":")
    return 60 * int(minutes) + int(seconds)


@pytest.mark.every_slurm
def test_a_job_whose_steps_are_stopped_for_a_while_trains_on(project: Project) -> None:
    job = project.train(f"--train.max_steps={STEPS}")
    project.reach(job, 5)
    project.cluster.run("login1", "scancel", "--signal=STOP", job)
    project.cluster.wait_for(job, "STOPPED")
    begin = _run_time(project, job)
    looked = lambda: _run_time(project, job) > begin + 3 * LOOK_EVERY  # noqa: E731
    project.wait_until(job, looked, "a look of the supervisor")
    project.cluster.run("login1", "scancel", "--signal=CONT", job)
    project.end(job)
    assert not project.events("stop_requested")
    assert project.events("completed")[0]["step"] == STEPS
    project.assert_states(job, "COMPLETED")


@pytest.mark.every_slurm
def test_a_held_job_is_said_to_be_held_until_it_is_released(project: Project) -> None:
    job = project.train(f"--train.max_steps={STEPS}")
    project.reach(job, 5)
    project.cluster.scontrol("requeuehold", job)
    project.cluster.wait_for(job, "PENDING", "REQUEUE_HOLD")
    shown = status(project, job)
    assert HELD in shown
    assert f"scontrol release {job}" in shown
    project.cluster.scontrol("release", job)
    project.attempt(job, 2)
    assert HELD not in status(project, job)
    project.end(job)


@pytest.mark.every_slurm
def test_an_expedited_job_comes_back_at_once_and_is_held_where_it_fails(
    project: Project, cluster: Cluster
) -> None:
    cluster.configure(extra={"SlurmctldParameters": "enable_expedited_requeue"})
    options = ("--requeue=expedite",)
    if "" < cluster.version < "25.11" or not cluster.version:
        with pytest.raises(RunError, match="--requeue"):
            project.train(nodes=1, options=options)
        return
    train = f"--train.max_steps={STEPS}"
    runs = {
        name: replace(project, run=replace(project.run, name=name))
        for name in ("warned", "cancelled", "given-up", "mistyped")
    }
    runs["given-up"].run.record.path.mkdir(parents=True)
    runs["given-up"].run.record.gave_up.write_text("It has led nowhere.\n")
    extra = {"mistyped": ["--train.max_stepz=1"]}
    jobs = {
        name: project.train(
            train, f"--run.name={name}", *extra.get(name, []), nodes=1, options=options
        )
        for name in runs
    }
    for name in ("warned", "cancelled"):
        runs[name].reach(jobs[name], 5)
    runs["warned"].warn(jobs["warned"])
    cluster.run("login1", "scancel", jobs["cancelled"])
    for name in ("given-up", "mistyped"):
        cluster.wait_for(jobs[name], "REQUEUE_HOLD")
    assert HELD in status(project, jobs["mistyped"])
    assert "GAVE_UP says why" in runs["given-up"].log(jobs["given-up"])
    cluster.wait_for(jobs["cancelled"], "CANCELLED")
    runs["warned"].attempt(jobs["warned"], 2)
    runs["warned"].end(jobs["warned"])
    for name in ("given-up", "mistyped"):
        assert cluster.job(jobs[name])["Restarts"] == "1"  # held, and not started again
        cluster.run("login1", "scancel", jobs[name])
        cluster.wait_for(jobs[name], "CANCELLED")
    assert cluster.job(jobs["cancelled"])["Restarts"] == "0"
    runs["warned"].assert_states(jobs["warned"], "REQUEUED", "COMPLETED")
