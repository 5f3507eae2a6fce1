"""The supervisor dies, alone or with its node, and its ranks put the job back into the queue, or
their agents where no rank can."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from lab import Cluster
from patience import slowed
from submitting import LONG, STEPS, Project

from kempner.run.record.lease import look

pytestmark = pytest.mark.timeout(480)

NO_GPUS = ("--no-kill", "--gpus-per-node=0")
"""Slurm 22.05 gives a job that lost a node, and is then requeued, no GPUs any more."""


def _wait_for_requeue(project: Project, job: str) -> None:
    """A rank waits for its peers ten times as long as its longest step took: long, if one did."""
    project.wait_until(job, lambda: project.events("requeued"), "the requeue", 240.0)


@pytest.mark.every_slurm
@pytest.mark.parametrize("loss", [pytest.param("crash", marks=pytest.mark.drill), "power_off"])
def test_a_job_without_its_supervisor_is_requeued_once(
    cluster: Cluster, project: Project, loss: str
) -> None:
    job = project.train(
        *LONG, f"--supervise.supervisor_timeout={slowed(10)}", nodes=3, options=NO_GPUS
    )
    project.reach(job, 31)
    assert cluster.job(job)["BatchHost"] == "node1"
    getattr(cluster, loss)("node1")  # and rank 0 with it: both of the others could ask Slurm
    _wait_for_requeue(project, job)
    newest = project.run.latest()
    project.end(job)
    (requeued,) = project.events("requeued")
    assert requeued["by_rank"] in (1, 2)  # the lower one, but for a machine that is very busy
    assert cluster.job(job)["Restarts"] == "1"
    # Rank 0 may have committed one more as it was lost, of which no other had heard.
    assert newest >= requeued["step"]
    assert f"resumed at step {newest}" in project.log(job)
    assert sorted(project.run.taken()) == list(range(8 * STEPS))


# `make check` kills one in test_supervisor_kills.py.
@pytest.mark.drill
@pytest.mark.every_slurm
def test_a_job_whose_supervisor_is_killed_is_requeued_with_all_that_it_has_done(
    cluster: Cluster, project: Project
) -> None:
    job = project.train(*LONG, nodes=2)
    project.reach(job, 31)
    seen = look(project.run.record.supervisors)
    assert seen is not None
    assert seen.holder is not None
    cluster.run(cluster.job(job)["BatchHost"], "kill", "-KILL", str(seen.holder.pid))
    _wait_for_requeue(project, job)
    (stopped,) = project.events("stopped")
    (requeued,) = project.events("requeued")
    assert requeued["by_rank"] in (0, None)  # the watchdog asks once no rank is left
    assert requeued["step"] == stopped["step"]
    assert stopped["lost_steps"] == 0
    project.end(job)
    assert cluster.job(job)["Restarts"] == "1"
    assert f"resumed at step {stopped['step']}" in project.log(job)
    assert "did not renew its lease" not in project.log(job)
    assert sorted(project.run.taken()) == list(range(8 * STEPS))


@pytest.mark.every_slurm
def test_agents_requeue_a_job_whose_batch_process_is_killed_while_no_rank_can(
    cluster: Cluster, project: Project
) -> None:
    job = project.train(*LONG, nodes=2)
    project.reach(job, 21)
    for node in ("node1", "node2"):
        project.signal_ranks(node, signal.SIGSTOP)
    (keeper,) = _processes(cluster, cluster.job(job)["BatchHost"], "kempner-keeper")
    os.kill(keeper, signal.SIGKILL)
    _assert_requeued_by_an_agent(cluster, project, job)


@pytest.mark.every_slurm
def test_agents_requeue_a_job_whose_batch_host_is_lost_while_no_rank_is_there(
    cluster: Cluster, project: Project
) -> None:
    job = project.train(*LONG, nodes=3, options=NO_GPUS)
    project.reach(job, 21)
    seen = look(project.run.record.supervisors)
    assert seen is not None
    assert seen.holder is not None
    cluster.run("node1", "kill", "-STOP", str(seen.holder.pid))  # it starts no ranks any more
    for node in ("node1", "node2", "node3"):
        project.signal_ranks(node, signal.SIGKILL)
    cluster.crash("node1")
    _assert_requeued_by_an_agent(cluster, project, job)


def _processes(cluster: Cluster, node: str, name: str) -> list[int]:
    """Those of this name, as numbered outside."""
    pids = cluster.machines[node].processes()
    return [pid for pid in pids if Path(f"/proc/{pid}/comm").read_text().strip() == name]


def _assert_requeued_by_an_agent(cluster: Cluster, project: Project, job: str) -> None:
    _wait_for_requeue(project, job)
    newest = project.run.latest()
    project.end(job)
    requeued, *_ = project.events("requeued")  # two agents may have asked at once, and tell of it
    assert (requeued.get("by_rank"), requeued["reason"][:22]) == (None, "the supervisor is gone")
    assert cluster.job(job)["Restarts"] == "1"
    assert f"resumed at step {newest}" in project.log(job)
    assert sorted(project.run.taken()) == list(range(8 * STEPS))
