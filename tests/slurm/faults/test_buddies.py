"""Nodes keep copies of each other's steps in memory: the loss of a node costs a step or two."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from drilling import note
from harness import KEMPNER, Run
from lab import Cluster
from submitting import STEPS, Project, assert_like

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(400)

BUDDY = ("--checkpoint.in_memory=true", "--checkpoint.buddy=true", "--checkpoint.buddy_share=1")
RARELY = (f"--train.max_steps={STEPS}", "--checkpoint.interval=1000")
"""What is on disk does not help."""


def made_in(project: Project, attempt: int) -> int:
    """The last step of an attempt of which rank 0 has told."""
    return max(step["step"] for step in project.run.metrics() if step["attempt"] == attempt)


def test_a_lost_node_costs_what_its_buddy_does_not_have(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    cluster.configure(slurmd_timeout=300)
    job = project.train(*RARELY, *BUDDY, "--supervise.spare_nodes=1", nodes=3)
    project.reach(job, 31)
    cluster.power_off("node2")
    project.attempt(job, 2)
    project.wait_until(job, lambda: project.events("resumed"), "it goes on")
    (salvaged,) = project.events("step_salvaged")
    again = made_in(project, 1) - salvaged["step"]
    note("lost node with a buddy", steps_made_again=again, seconds=salvaged["seconds"])
    assert salvaged["from_buddies"] == 1
    assert salvaged["step"] == project.events("resumed")[-1]["step"]
    assert again <= 3
    subprocess.run([*KEMPNER, "checkpoint", "verify", project.run.checkpoints], check=True)
    project.end(job)
    assert_like(project.run, undisturbed)


def test_one_of_two_buddies_is_enough_and_without_both_the_disk_is_there(
    project: Project, undisturbed: Run
) -> None:
    """Their agents are killed, and with those goes their memory; the nodes stay."""
    job = project.train(f"--train.max_steps={STEPS}", "--checkpoint.interval=25", *BUDDY)
    project.reach(job, 21)
    kill_agents(project, "node2")
    project.attempt(job, 2)
    project.wait_until(job, lambda: project.events("resumed"), "it goes on")
    (salvaged,) = project.events("step_salvaged")
    assert salvaged["from_buddies"] == 1
    saved = {e["step"] for e in project.events("checkpoint_committed") if e["attempt"] == 1}
    older = saved - {salvaged["step"]}  # how far the copies lag, the drills measure
    assert salvaged["step"] > max(older, default=0)
    project.reach(job, salvaged["step"] + 15)
    kill_agents(project, "node1", "node2")
    project.attempt(job, 3)
    project.end(job)
    newest = max(e["step"] for e in project.events("checkpoint_committed") if e["attempt"] <= 2)
    assert project.events("resumed")[-1]["step"] == newest
    assert len(project.events("step_salvaged")) == 1
    assert_like(project.run, undisturbed)


def kill_agents(project: Project, *nodes: str) -> None:
    """At once, or as near as it gets."""
    logs = [project.run.record.supervisor_log(n) for n in range(1, project.run.attempt() + 1)]
    said = [line for log in logs for line in read_lines(log)]
    pids = {line["node"]: line["pid"] for line in said if line["event"] == "agent connected"}
    for node in nodes:
        project.cluster.run(node, "kill", "-KILL", str(pids[node]))


@pytest.mark.drill
def test_lost_memory_of_one_node_after_the_other(project: Project, undisturbed: Run) -> None:
    """Ten agents are killed, with what their nodes hold, while copies are sent now and then."""
    options = *BUDDY[:2], f"--train.max_steps={STEPS}", "--checkpoint.interval=1000"
    job = project.train(*options)
    again = []
    for attempt in range(1, 11):
        at = max(project.run.steps(), default=0) + 9
        project.reach(job, at)
        kill_agents(project, f"node{attempt % 2 + 1}")
        project.attempt(job, attempt + 1)
        project.wait_until(job, lambda n=attempt: len(project.events("resumed")) == n, "it goes on")
        again.append(made_in(project, attempt) - project.events("resumed")[-1]["step"])
    project.end(job)
    note("lost memory of a node with a buddy", steps_made_again=again)
    assert len(project.events("step_salvaged")) == 10
    assert_like(project.run, undisturbed)


@pytest.mark.drill
def test_a_buddy_has_the_steps_of_an_adapter(project: Project, tmp_path: Path) -> None:
    """The weights beside which it is trained are on the storage, and nothing else of it is."""
    base, reference = (Run(tmp_path / name, project.run.data) for name in ("base", "reference"))
    base.complete(1, "--train.max_steps=2")
    again = ("--step", "0", "--cursor", "0")
    for one in (project.run, reference):
        source = [*KEMPNER, "checkpoint", "import", base.record.path, "--into", one.record.path]
        subprocess.run([*source, *again], check=True)
    adapter = ("--adapter.rank=2", "--adapter.dropout=0.1")
    reference.complete(2, *RARELY, *adapter)
    job = project.train(*RARELY, *BUDDY, *adapter)
    project.reach(job, 31)
    kill_agents(project, "node2")
    project.attempt(job, 2)
    project.wait_until(job, lambda: len(project.events("resumed")) == 2, "it goes on")
    (salvaged,) = project.events("step_salvaged")
    assert salvaged["from_buddies"] == 1
    assert salvaged["step"] == project.events("resumed")[-1]["step"] >= 28
    project.end(job)
    assert_like(project.run, reference)
