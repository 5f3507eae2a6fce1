"""A node computes wrong bits, and nothing on it says so: the others find it out, and go on without
it from a checkpoint that is certified."""

from __future__ import annotations

from pathlib import Path

import pytest
from drilling import note
from harness import Run, drills
from lab import Cluster
from submitting import Project, assert_like

from kempner.checkpoint.compare import open_kempner, pairs
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)

STEPS = 40
OPTIONS = (
    f"--train.max_steps={STEPS}",
    "--train.same_on_any_world=true",
    "--checkpoint.interval=5",
    "--integrity.recompute_interval=10",
    "--supervise.grow_after=1",
)
LIES_FROM = 16
LIE = f"flip on node2 by 12 from step {LIES_FROM} in activations"
"""Wherever the ranks are: a run that went back there would be another one again."""


@pytest.mark.parametrize(
    ("least", "restarts", "says"),
    [
        ("2", "0", "restarting from step 10"),
        *drills(("3", "1", "requeueing the job without node2")),
    ],
)
def test_a_node_that_lies_is_named_and_left_out_and_no_bit_of_its_lies_is_left(
    cluster: Cluster, project: Project, tmp_path: Path, least: str, restarts: str, says: str
) -> None:
    """The run goes on smaller where it may, else the job goes on elsewhere."""
    alone = Run(tmp_path / "alone", project.run.data)
    alone.complete(1, *OPTIONS)
    smallest = f"--supervise.min_nodes={least}"
    job = project.train(*OPTIONS, smallest, nodes=3, KEMPNER_FAULTS=LIE)
    project.end(job)
    (found,) = project.events("corruption_found")
    known = ("step", "nodes", "sure", "to")
    assert [found[name] for name in known] == [20, ["node2"], True, 10]
    (suspect,) = project.events("suspect")
    assert (suspect["node"], suspect["reason"]) == ("node2", found["reason"])
    assert [event["step"] for event in project.events("resumed")] == [10]
    assert ("node2" in hosts(project, 1), "node2" in hosts(project, 2)) == (True, False)
    assert (len(hosts(project, 2)), cluster.job(job)["Restarts"]) == (2 + int(restarts), restarts)
    assert project.events("nodes_taken_back") == []
    assert says in project.log(job)
    assert_like(project.run, alone)
    last = [open_kempner(run.checkpoints / f"step-{STEPS:08}") for run in (project.run, alone)]
    assert [pair.name for pair in pairs(*last, on_bytes=lambda _: None) if not pair.equal] == []
    assert project.events("checkpoints_certified")[-1]["step"] == STEPS
    note("lying node", node="node2", since=LIES_FROM, found=found["step"], back_to=found["to"])


@pytest.mark.drill
def test_a_node_that_has_lied_is_not_taken_back_however_well_it_looks(project: Project) -> None:
    """A restart would take it back, as it costs nothing then: it has been well for long enough."""
    others = "slow rank 0 by 20 from step 11 attempt 2; kill rank 1 at step 60 attempt 2"
    options = ("--train.max_steps=70", *OPTIONS[1:], "--supervise.min_nodes=2")
    job = project.train(*options, nodes=3, KEMPNER_FAULTS=f"{LIE}; {others}")
    project.end(job)
    assert [event["ranks"] for event in project.events("attempt_started")] == [3, 2, 2]
    assert project.events("nodes_taken_back") == []
    assert len(project.events("corruption_found")) == 1


def hosts(project: Project, attempt: int) -> list[str]:
    """Those of the ranks of an attempt."""
    logs = [project.run.record.log(attempt, rank) for rank in range(3)]
    return [e["host"] for log in logs for e in read_lines(log) if e["event"] == "ready"]
