"""A node that is to go: the ranks leave it at a vote, before it goes, and no step is lost."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from drilling import note
from harness import Run, wait_until
from lab import Cluster
from neighbours import Neighbours
from submitting import LONG, Project, assert_like

from kempner.cluster.slurm.hostlist import expand_hosts

pytestmark = [pytest.mark.timeout(400), pytest.mark.every_slurm]


def drain(cluster: Cluster, node: str) -> None:
    cluster.scontrol("update", f"nodename={node}", "state=drain", "reason=its fan is loud")


def reserve(cluster: Cluster, node: str) -> None:
    when = ("starttime=now+10minutes", "duration=60", "user=root", "flags=maint,ignore_jobs")
    cluster.scontrol("create", "reservation", "reservationname=lift", *when, f"nodes={node}")


def freed(project: Project, job: str, node: str) -> None:
    """Wait until the node's ranks are gone, and note how long that took."""
    project.wait_until(job, lambda: project.events("stop_requested"), "a stop for the node")
    (asked,) = project.events("stop_requested")
    project.wait_until(job, lambda: not project.ranks(node), f"{node} without ranks")
    seconds = round(time.time() - asked["time"], 2)
    *_, before, last = project.run.metrics()
    note("drained node", node=node, seconds=seconds, step=round(last["time"] - before["time"], 2))
    assert asked["reason"] == "node_leaves"
    project.wait_until(job, lambda: project.events("stopped"), "their stop in the ledger")
    (stopped,) = project.events("stopped")
    assert (stopped["reason"], stopped["lost_steps"]) == ("node_leaves", 0)


def test_a_spare_node_takes_its_place(
    cluster: Cluster, project: Project, undisturbed: Run, neighbours: Neighbours
) -> None:
    """Slurm has the drained one back, with nothing on it, as long as the run goes on."""
    project.slow("node1", "node2", "node3")
    job = project.train(*LONG, "--supervise.spare_nodes=1", nodes=3)
    project.reach(job, 3)
    neighbours.arrive()
    drain(cluster, "node2")
    freed(project, job, "node2")
    shown = lambda: cluster.run("login1", "scontrol", "show", "node", "-o", "node2").stdout  # noqa: E731
    wait_until(lambda: " State=IDLE+DRAIN " in shown(), "node2 is drained", 90)
    assert cluster.job(job)["JobState"] == "RUNNING"
    project.hurry()
    project.end(job)
    assert cluster.job(job)["Restarts"] == "0"
    assert [e["ranks"] for e in project.events("attempt_started")] == [2, 2]
    (left,), (back,) = project.events("nodes_left"), project.events("nodes_given_back")
    assert left["nodes"] == back["nodes"] == ["node2"]
    assert "it drains (its fan is loud)" in left["reason"]
    assert not project.events("suspect")
    assert_like(project.run, undisturbed)


@pytest.mark.parametrize(
    ("way", "node"),
    [
        (drain, "node2"),
        pytest.param(drain, "node1", marks=pytest.mark.drill),
        pytest.param(reserve, "node2", marks=pytest.mark.drill),
    ],
    ids=["drained", "batch host", "maintenance"],
)  # fmt: skip
def test_without_a_spare_the_job_goes_on_elsewhere(
    cluster: Cluster,
    project: Project,
    undisturbed: Run,
    neighbours: Neighbours,
    way: Callable[[Cluster, str], None],
    node: str,
) -> None:
    project.slow()
    job = project.train(*LONG, nodes=2)
    project.reach(job, 3)
    neighbours.arrive()
    way(cluster, node)
    freed(project, job, node)
    project.hurry()
    project.wait_until(job, lambda: project.events("requeued"), "the requeue")
    neighbours.leave()
    project.end(job)
    (requeued,) = project.events("requeued")
    assert requeued["without"] == [node]
    assert node not in expand_hosts(cluster.job(job)["NodeList"])
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert not project.events("suspect")
    assert_like(project.run, undisturbed)
