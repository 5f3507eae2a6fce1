"""A Slurm that answers late, wrongly or not at all: every job ends as with one that is well.

Of every ten calls of a command three go wrong (`misbehaving.py`), the accounting database is down
throughout, and the controller is away for a while at the worst moments: `make check` has one of
them, `make long` has all, for three minutes each.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from harness import Run, wait_until
from lab import Cluster
from misbehaving import Shims
from submitting import LONG, Project, assert_like

from kempner.cluster.slurm.hostlist import expand_hosts

pytestmark = [pytest.mark.timeout(900), pytest.mark.every_slurm]

BENT = {"SLURM_TIME_FORMAT": "relative", "SQUEUE_FORMAT": "%i", "SLURM_KILL_BAD_EXIT": "1"}
"""What a user's .bashrc may hold, and what changes how Slurm's commands ask and print."""


@pytest.fixture
def bookless(cluster: Cluster) -> Iterator[Cluster]:
    """A cluster whose accounting database is down."""
    cluster.lose_accounting()
    yield cluster
    cluster.restore_accounting()


def train(project: Project, bent: Shims, *overrides: str, options: tuple[str, ...] = ()) -> str:
    return project.train(*LONG, *overrides, options=options, PATH=bent.path, **BENT)


def away(cluster: Cluster, seconds: float, bent: Shims) -> None:
    """The controller is away for so long, and at least until it was asked in vain."""
    cluster.lose_controller()
    since, end = time.time(), time.monotonic() + seconds

    def over() -> bool:
        asked = [line for line in bent.log() if line["time"] > since]
        return time.monotonic() > end and any(line.get("code") for line in asked)

    wait_until(over, "the controller was missed", seconds + 120, interval=0.2)
    cluster.restore_controller()


def assert_came_back(project: Project, job: str, restarts: int, undisturbed: Run) -> None:
    """Started again as often as that, and told so once each time; nothing is lost or repeated."""
    project.end(job, deadline=300)
    assert project.cluster.job(job)["Restarts"] == str(restarts)
    assert len(project.events("requeued")) == restarts
    assert not project.events("not_requeued")
    assert all(event["lost_steps"] == 0 for event in project.events("stopped"))
    assert_like(project.run, undisturbed)


def test_a_controller_that_leaves_at_the_worst_moments_strands_nobody(
    bookless: Cluster, project: Project, undisturbed: Run
) -> None:
    """Between the last commit and the requeue, and as the ranks are to be started again."""
    project.slow()
    bent = Shims.install(project.folder / "bin", seed=1)
    job = train(project, bent)
    project.reach(job, 3)
    bent.expect("requeue")
    project.warn(job)
    with bent.hold("requeue"):
        assert project.run.latest() == max(project.run.steps())
        bent.expect("--job-name=kempner-agents")
        bookless.lose_controller()
    away(bookless, 15, bent)
    with bent.hold("--job-name=kempner-agents"):
        bookless.lose_controller()
    away(bookless, 5, bent)
    project.hurry()
    assert_came_back(project, job, 1, undisturbed)
    assert [event["attempt"] for event in project.events("resumed")] == [2]
    assert not project.events("attempt_failed")
    assert not project.events("suspect")
    assert {line["what"] for line in bent.log()} > {"held", "done", ""}


MINUTES = 180.0
"""Seconds for which the controller is away in the drills."""


@pytest.mark.drill
@pytest.mark.parametrize("moment", ["show", "--job-name=kempner-agents", "requeue"])
def test_a_controller_may_be_away_for_minutes(
    bookless: Cluster, project: Project, undisturbed: Run, moment: str
) -> None:
    """As the job starts, as its ranks do, and when it is to be requeued."""
    bent = Shims.install(project.folder / "bin", seed=2)
    bent.expect(moment)
    project.slow()
    job = train(project, bent)
    if moment == "requeue":
        project.reach(job, 3)
        project.warn(job)
    with bent.hold(moment):
        bookless.lose_controller()
    away(bookless, MINUTES, bent)
    project.hurry()
    assert_came_back(project, job, int(moment == "requeue"), undisturbed)
    assert not project.events("attempt_failed")


@pytest.mark.drill
def test_a_controller_that_is_away_before_the_stop_and_past_the_jobs_end(
    bookless: Cluster, project: Project, undisturbed: Run
) -> None:
    """The ranks stop in time by what was known, and the job is requeued when it comes back."""
    bent = Shims.install(project.folder / "bin", seed=3)
    project.slow()
    job = train(project, bent, options=("--time=3",))
    project.reach(job, 10)
    wait_until(lambda: len(bent.log("config")) > 0, "the controller's clock is known", 60)
    away(bookless, MINUTES, bent)
    (stopped,) = project.events("stopped")
    assert stopped["reason"] == "deadline"
    project.attempt(job, 2)
    project.cluster.scontrol("update", f"jobid={job}", "TimeLimit=60")
    project.hurry()
    assert_came_back(project, job, 1, undisturbed)


@pytest.mark.drill
@pytest.mark.parametrize("seed", [4, 5, 6])
def test_a_cancelled_job_is_not_revived(bookless: Cluster, project: Project, seed: int) -> None:
    bent = Shims.install(project.folder / "bin", seed)
    project.slow()
    job = train(project, bent)
    project.reach(job, 5)
    project.cluster.run("login1", "scancel", job)
    project.end(job, "CANCELLED")
    assert project.run.latest() == max(project.run.steps())
    assert not project.events("requeued")
    assert len(project.events("not_requeued")) == 1
    assert project.cluster.job(job)["Restarts"] == "0"


@pytest.mark.drill
@pytest.mark.parametrize("seed", [7, 8, 9])
def test_a_preempted_job_comes_back_once(
    bookless: Cluster, project: Project, undisturbed: Run, seed: int
) -> None:
    bent = Shims.install(project.folder / "bin", seed)
    project.slow()
    job = train(project, bent)
    project.reach(job, 5)
    project.cluster.wait_for(project.cluster.preempt(job, seconds=1), "COMPLETED")
    project.attempt(job, 2)
    project.hurry()
    assert_came_back(project, job, 1, undisturbed)


@pytest.mark.drill
@pytest.mark.parametrize("seed", [10, 11])
def test_a_job_that_loses_a_node_comes_back_without_it(
    bookless: Cluster, project: Project, undisturbed: Run, seed: int
) -> None:
    bookless.configure(slurmd_timeout=300)
    bent = Shims.install(project.folder / "bin", seed)
    job = train(project, bent, options=("--exclude=node8",))
    project.reach(job, 31)
    bookless.crash("node2")
    project.attempt(job, 2)
    project.end(job, deadline=300)
    after = bookless.job(job)
    assert after["Restarts"] == "1"
    (requeued,) = project.events("requeued")
    assert requeued["without"] == ["node2"]
    # Without its database Slurm refuses to change a job for longer than this process lives.
    told = project.run.record.supervisor_log(1).read_text()
    refused = "the DB index is being set" in told or "has not excluded a node" in told
    excluded = {"node8"} if refused and after["ExcNodeList"] == "node8" else {"node2", "node8"}
    assert set(expand_hosts(after["ExcNodeList"])) == excluded
    assert_like(project.run, undisturbed)
