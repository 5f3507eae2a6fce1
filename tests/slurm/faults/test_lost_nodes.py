"""A node crashes, or loses its power: the run goes on without it, long before Slurm has noticed.

`make check` has one of each way to go on that Slurm has a part in; `make long` has the others.
"""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest
from drilling import note
from harness import Run
from lab import Cluster
from neighbours import Neighbours
from submitting import LONG, Project, assert_like

from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(400)


@pytest.fixture
def patient(cluster: Cluster) -> Cluster:
    """A cluster that takes five minutes to call a node down, as most do."""
    cluster.configure(slurmd_timeout=300)
    return cluster


def lose(
    project: Project, job: str, loss: str, node: str, neighbours: Neighbours | None = None
) -> None:
    """Lose a node after some commits, and wait for the first step after that. Neighbours wait for
    nodes meanwhile, and if the job is requeued leave, or it would wait for them."""
    project.reach(job, 31)
    if neighbours is not None:
        neighbours.arrive()
    started = len(project.events("attempt_started"))
    getattr(project.cluster, loss)(node)
    lost_at = time.time()

    def again() -> bool:
        if neighbours is not None and project.events("requeued"):
            neighbours.leave()
        return project.run.attempt() > started

    project.wait_until(job, again, "another attempt", 180)
    reached = max(project.run.steps())
    project.reach(job, reached + 1)
    (suspect,) = project.events("suspect")
    assert (suspect["node"], suspect["reason"]) == (node, "it does not respond")
    note("lost node", loss=loss, node=node, seconds=round(time.time() - lost_at, 1))


@pytest.mark.every_slurm
@pytest.mark.parametrize("loss", [pytest.param("crash", marks=pytest.mark.drill), "power_off"])
def test_a_spare_node_takes_its_place(
    patient: Cluster, project: Project, undisturbed: Run, neighbours: Neighbours, loss: str
) -> None:
    """It is kept until Slurm, too, sees that it is gone: it would be the next one's in line."""
    project.slow("node1", "node2", "node3")
    job = project.train(*LONG, "--supervise.spare_nodes=1", nodes=3)
    lose(project, job, loss, "node2", neighbours)
    project.wait_until(job, lambda: project.events("nodes_given_back"), "node2 to be given back")
    shown = patient.run("login1", "scontrol", "show", "node", "-o", "node2").stdout
    assert "NOT_RESPONDING" in shown or "DOWN" in shown
    assert set(expand_hosts(patient.job(job)["NodeList"])) == {"node1", "node3"}
    project.hurry()
    project.end(job)
    assert patient.job(job)["Restarts"] == "0"
    assert [e["ranks"] for e in project.events("attempt_started")] == [2, 2]
    assert_like(project.run, undisturbed)


@pytest.mark.drill
@pytest.mark.parametrize("loss", ["crash", "power_off"])
def test_without_a_spare_the_run_goes_on_smaller_without_a_changed_bit(
    patient: Cluster, project: Project, tmp_path: Path, loss: str
) -> None:
    options = (*LONG, "--train.same_on_any_world=true")
    alone = Run(tmp_path / "alone", project.run.data)
    alone.complete(1, *options)
    job = project.train(*options, "--supervise.min_nodes=2", nodes=3)
    lose(project, job, loss, "node2")
    project.end(job)
    assert patient.job(job)["Restarts"] == "0"
    assert [e["ranks"] for e in project.events("attempt_started")] == [3, 2]
    assert_like(project.run, alone)


@pytest.mark.every_slurm
@pytest.mark.parametrize("loss", ["crash", pytest.param("power_off", marks=pytest.mark.drill)])
def test_with_neither_the_job_is_requeued_without_the_node(
    patient: Cluster, project: Project, undisturbed: Run, neighbours: Neighbours, loss: str
) -> None:
    project.slow()
    job = project.train(*LONG, nodes=2, options=("--exclude=node8",))
    lose(project, job, loss, "node2", neighbours)
    project.hurry()
    project.end(job)
    (requeued,) = project.events("requeued")
    assert "without node2" in requeued["reason"]
    after = patient.job(job)
    assert after["Restarts"] == "1"
    assert set(expand_hosts(after["ExcNodeList"])) == {"node2", "node8"}
    assert not {"node2", "node8"} & set(expand_hosts(after["NodeList"]))
    allocated = after["TRES"] if "TRES" in after else after["AllocTRES"]  # from 23.02 on
    assert "gres/gpu=2" in allocated
    assert_like(project.run, undisturbed)


def test_a_healthy_node_of_a_job_with_gpus_for_all_of_it_is_not_lost(
    cluster: Cluster, project: Project
) -> None:
    """Two GPUs are too many for the step that asks one node whether it lives."""
    project.slow()
    job = project.train("--train.max_steps=40", options=("--gpus=2",))
    project.reach(job, 5)
    project.signal_ranks("node2", signal.SIGKILL)
    project.attempt(job, 2)
    project.hurry()
    project.end(job)
    assert not project.events("suspect")
    assert [event["ranks"] for event in project.events("attempt_started")] == [2, 2]
    assert (cluster.job(job)["Restarts"], cluster.job(job)["NumNodes"]) == ("0", "2")


@pytest.mark.drill
def test_where_there_are_too_few_others_the_job_waits_for_the_node(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    """A job that excluded it could never start: Slurm would hold it until an operator looks."""
    cluster.configure(slurmd_timeout=45)
    job = project.train(*LONG, nodes=2, options=("--exclude=node[3-8]",))
    project.reach(job, 31)
    cluster.crash("node2")
    project.wait_until(job, lambda: project.events("requeued"), "the requeue")
    assert "to wait for node2 because there are too few other nodes" in project.log(job)
    cluster.wait_for(job, "PENDING")
    unavailable = lambda: "ReqNodeNotAvail" in cluster.job(job)["Reason"]  # noqa: E731
    project.wait_until(job, unavailable, "Slurm to wait for the node")
    assert cluster.job(job)["Priority"] != "0"
    cluster.boot("node2")
    project.end(job)
    assert cluster.job(job)["Restarts"] == "1"
    assert_like(project.run, undisturbed)


@pytest.mark.drill
def test_a_node_that_only_the_supervisor_cannot_reach_is_not_lost(
    patient: Cluster, project: Project
) -> None:
    patient.configure(open_management=True)
    project.slow()
    job = project.train("--train.max_steps=60", "--supervise.control_interface=em4", nodes=2)
    project.reach(job, 5)
    patient.cut("node2", "em4", "silent")
    log = project.run.record.supervisor_log(1)
    parted = lambda: any(e["event"] == "rank disconnected" for e in read_lines(log))  # noqa: E731
    project.wait_until(job, parted, "the connection is given up")
    project.reach(job, max(project.run.steps()) + 10)
    patient.heal("node2", "em4")
    project.hurry()
    project.end(job)
    assert project.run.attempt() == 1
