"""A run that went smaller takes a node back that is well again, at a stop of all ranks."""

from __future__ import annotations

import signal
import time

import pytest
from drilling import note
from submitting import Project
from test_unfit_nodes import runs_hidden_from_node2

pytestmark = pytest.mark.timeout(400)

STEPS = 500
OPTIONS = (f"--train.max_steps={STEPS}", "--checkpoint.interval=50", "--supervise.min_nodes=2")


def steps_of(project: Project, attempt: int) -> list[tuple[int, float]]:
    """The steps of an attempt, each with when it was made."""
    lines = project.run.metrics()
    return [(line["step"], line["time"]) for line in lines if line["attempt"] == attempt]


def go_smaller(project: Project, job: str, attempt: int) -> None:
    """Kill the rank on node2 and wait for the first step without it."""
    project.signal_ranks("node2", signal.SIGKILL)
    project.wait_until(job, lambda: steps_of(project, attempt + 1), "a step without node2")


def test_a_node_that_is_well_again_is_taken_back_without_a_step_lost(project: Project) -> None:
    job = project.train(*OPTIONS, "--supervise.grow_after=4", nodes=3)
    project.reach(job, 21)
    with runs_hidden_from_node2(project):
        go_smaller(project, job, 1)
        assert [e["ranks"] for e in project.events("attempt_started")] == [3, 2]
    project.wait_until(job, lambda: steps_of(project, 3), "a step with node2 again")
    killed_at = time.time()
    project.signal_ranks("node3", signal.SIGKILL)
    project.wait_until(job, lambda: steps_of(project, 4), "a step after a warm restart")
    project.end(job)
    assert [e["ranks"] for e in project.events("attempt_started")] == [3, 2, 3, 3]
    (stopped,) = project.events("stopped")
    assert (stopped["reason"], stopped["lost_steps"]) == ("grow", 0)
    (back,) = project.events("nodes_taken_back")
    assert back["nodes"] == ["node2"]
    small, large = steps_of(project, 2), steps_of(project, 3)
    assert small[-1][0] + 1 == large[0][0]
    change, warm = large[0][1] - small[-1][1], steps_of(project, 4)[0][1] - killed_at
    note("growth", change=round(change, 2), warm_restart=round(warm, 2))
    assert len(project.events("attempt_failed")) == 2
    assert project.events("requeued") == []
    assert project.cluster.job(job)["Restarts"] == "0"
    assert sorted(project.run.taken()) == list(range(8 * STEPS))


@pytest.mark.drill
def test_a_node_that_fails_again_at_once_is_not_taken_back_at_once(project: Project) -> None:
    wait = 4.0
    job = project.train(*OPTIONS, f"--supervise.grow_after={wait}", nodes=3)
    project.reach(job, 21)
    for attempt in (1, 3):
        with runs_hidden_from_node2(project):
            go_smaller(project, job, attempt)
        if attempt == 1:
            project.wait_until(job, lambda: steps_of(project, 3), "a step with node2 again")
    well_again = time.time()
    project.end(job)
    assert time.time() - well_again > 2 * wait, "the run is too short to show anything"
    first, *later = project.events("nodes_taken_back")
    suspect = project.events("suspect")[-1]
    assert (first["nodes"], suspect["node"]) == (["node2"], "node2")
    assert first["time"] < suspect["time"]
    assert all(back["time"] - suspect["time"] > 2 * wait for back in later)
    assert len(project.events("attempt_started")) == 4 + len(later)
    assert sorted(project.run.taken()) == list(range(8 * STEPS))


@pytest.mark.drill
@pytest.mark.parametrize("how", ["warned", "killed"])
def test_what_happens_while_the_ranks_stop_to_grow(project: Project, how: str) -> None:
    """A rank that stands still holds the vote open: a warning of Slurm then ends the run for now,
    and the death of that rank is a failure as any other, after which the node is there again."""
    job = project.train(*OPTIONS, "--supervise.grow_after=4", nodes=3)
    project.reach(job, 21)
    with runs_hidden_from_node2(project):
        project.slow("node1", "node3")  # or these would take less than the ranks need to tell
        go_smaller(project, job, 1)
        project.wait_until(job, lambda: len(steps_of(project, 2)) > 9, "all ranks to train")
    project.signal_ranks("node3", signal.SIGSTOP)
    asked = lambda: [e["reason"] for e in project.events("stop_requested")]  # noqa: E731
    project.wait_until(job, lambda: asked() == ["grow"], "the stop to grow")
    if how == "warned":
        project.warn(job)
        project.wait_until(job, lambda: len(asked()) > 1, "the stop of the run")
        project.signal_ranks("node3", signal.SIGCONT)
        project.wait_until(job, lambda: project.events("requeued"), "the requeue")
    else:
        project.signal_ranks("node3", signal.SIGKILL)
    project.hurry()
    project.end(job)
    assert [e["ranks"] for e in project.events("attempt_started")] == [3, 2, 3]
    assert len(project.events("requeued")) == (how == "warned")
    assert len(project.events("nodes_taken_back")) == (how == "killed")
    assert len(project.events("attempt_failed")) == 1 + (how == "killed")
    assert sorted(project.run.taken()) == list(range(8 * STEPS))
