"""Nodes of other jobs take part in a run, and leave it again (`kempner join`)."""

from __future__ import annotations

import signal
import stat
import time

import pytest
from drilling import note
from patience import slowed
from submitting import Project

from kempner.run.record.lease import look

pytestmark = [
    pytest.mark.timeout(400),
    pytest.mark.alone("the jobs that join must start at once, on the nodes that the tests name"),
]

STEPS = 300
OPTIONS = (f"--train.max_steps={STEPS}", "--checkpoint.interval=50")


def join(project: Project, *options: str) -> str:
    """Submit a job of one node that joins the run."""
    folder = project.run.record.path.relative_to(project.folder)
    return project.submit("join.sh", str(folder), options=("--nodes=1", *options))


def ranks(project: Project) -> list[int]:
    """How many ranks each attempt had."""
    return [event["ranks"] for event in project.events("attempt_started")]


def steps_of(project: Project, attempt: int) -> list[int]:
    return [line["step"] for line in project.run.metrics() if line["attempt"] == attempt]


def assert_every_sample_once(project: Project) -> None:
    assert sorted(project.run.taken()) == list(range(8 * STEPS))


def test_nodes_of_other_jobs_come_and_go_without_a_step_lost(project: Project) -> None:
    """Two come at the same time. One is warned of its time limit, and goes back into the queue;
    it joins again. The run is complete: both end."""
    job = project.train(*OPTIONS)
    project.reach(job, 5)
    project.slow()
    mode = project.run.record.invitation.stat().st_mode
    assert stat.S_IMODE(mode) == 0o600
    first, second = join(project), join(project)
    project.wait_until(job, lambda: steps_of(project, 2), "a step on four nodes")
    assert ranks(project) == [2, 4]
    project.warn(first)
    project.wait_until(job, lambda: len(ranks(project)) > 2, "the start without it")
    project.hurry()
    project.end(job)
    for one in (first, second):
        project.end(one)
    assert ranks(project)[:3] == [2, 4, 3]
    assert project.cluster.job(first)["Restarts"] == "1"
    stopped = project.events("stopped")
    assert [e["reason"] for e in stopped][:2] == ["grow", "node_leaves"]
    assert all(e["lost_steps"] == 0 for e in stopped)
    assert project.events("attempt_failed") == []
    assert project.events("suspect") == []
    (came, *_), (left, *_) = project.events("nodes_joined"), project.events("nodes_left")
    assert sorted(came["jobs"]) == sorted([first, second])
    assert left["nodes"] == ["node3"]
    assert "lost" not in left
    assert_every_sample_once(project)


def test_one_that_dies_costs_what_its_buddy_does_not_have(project: Project) -> None:
    """Its node loses its power. The run goes on without it, and does not suspect it, which it could
    not look into."""
    memory = "--checkpoint.in_memory=true", "--checkpoint.buddy=true", "--checkpoint.buddy_share=1"
    job = project.train(*OPTIONS[:1], "--checkpoint.interval=1000", *memory)
    project.reach(job, 5)
    project.slow(rate="16mbit")
    join(project, "--no-requeue")  # or it would join again, if the run lasts
    project.wait_until(job, lambda: len(steps_of(project, 2)) > 5, "some steps on three nodes")
    began = time.monotonic()
    project.cluster.power_off("node3")
    project.wait_until(job, lambda: steps_of(project, 3), "a step without it")
    seconds = time.monotonic() - began
    for node in ("node1", "node2"):
        project.cluster.heal(node, "ib0")
    project.end(job)
    assert ranks(project) == [2, 3, 2]
    again = steps_of(project, 2)[-1] - project.events("resumed")[-1]["step"]
    note("lost node of another job", steps_made_again=again, seconds=round(seconds, 1))
    assert again <= 3
    (left,) = project.events("nodes_left")
    assert left["lost"] is True
    assert project.events("suspect") == []
    assert project.events("requeued") == []
    assert_every_sample_once(project)


@pytest.mark.drill
def test_one_whose_time_is_nearer_leaves_before_it_is_over(project: Project) -> None:
    """Slurm sends no warning: its job has half of its one minute, and comes back for more. As long
    as the time of a restart is unknown, so little time does not pay: one comes first."""
    job = project.train(*OPTIONS)
    project.reach(job, 5)
    project.slow(rate="2mbit")
    project.signal_ranks("node2", signal.SIGKILL)
    project.wait_until(job, lambda: steps_of(project, 2), "a step after the restart")
    joiner = join(project, "--time=1", "--signal=B:SIGURG@1")
    project.wait_until(job, lambda: project.events("nodes_left"), "it to leave")
    project.hurry()
    project.end(job)
    project.end(joiner)
    assert ranks(project)[:4] == [2, 2, 3, 2]
    (left, *_) = project.events("nodes_left")
    assert "left of the job's time" in left["reason"]
    assert "lost" not in left
    assert int(project.cluster.job(joiner)["Restarts"]) >= 1
    ended = [e for e in project.events("attempt_ended") if e["code"] == 75]
    assert [e["reason"] for e in ended if "killed" in e["reason"]] == []
    assert all(e["lost_steps"] == 0 for e in project.events("stopped"))
    assert len(project.events("attempt_failed")) == 1
    assert_every_sample_once(project)


@pytest.mark.drill
def test_of_two_supervisors_the_newer_one_has_those_that_joined(project: Project) -> None:
    """The first one stands still, and goes on when another has taken over the run."""
    options = (
        *OPTIONS,
        f"--supervise.lease={slowed(5)}",
        f"--supervise.supervisor_timeout={slowed(10)}",
    )
    older = project.train(*options, nodes=2, options=("--no-requeue",))
    project.reach(older, 5)
    project.slow()
    joiner = join(project)
    project.wait_until(older, lambda: steps_of(project, 2), "a step on three nodes")
    seen = look(project.run.record.supervisors)
    assert seen is not None
    assert seen.holder is not None
    project.cluster.run("node1", "kill", "-STOP", str(seen.holder.pid))
    newer = project.train(*options, nodes=2)
    project.slow("node4", "node5")
    project.wait_until(newer, lambda: len(project.events("nodes_joined")) > 1, "the change")
    project.cluster.run("node1", "kill", "-CONT", str(seen.holder.pid))
    project.end(older, "FAILED")
    project.wait_until(newer, lambda: ranks(project)[-1] == 3, "three ranks of the newer one")
    project.hurry()
    project.end(newer)
    project.end(joiner)
    assert ranks(project) == [2, 3, 2, 3]
    assert project.cluster.job(joiner)["Restarts"] == "0"
    assert project.cluster.job(newer)["Restarts"] == "0"
    assert_every_sample_once(project)
