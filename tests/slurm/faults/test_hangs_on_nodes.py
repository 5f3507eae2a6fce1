"""A rank that is stopped on another node, and a node that is off the fabric: found, and named.

The node then counts as suspect, and a spare one takes its place.
"""

from __future__ import annotations

import signal

import pytest
from harness import Run
from lab import Cluster
from patience import slowed
from submitting import LONG, Project, assert_like

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(400)

STEPS = 280
NOTICED = slowed(8.0, most=30.0)
"""Seconds until a hang is noticed: before the links break, which takes about a minute."""

OPTIONS = (
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=20",
    f"--resilience.hang_timeout_min={NOTICED}",
)


def test_what_hangs_on_another_node_is_named_by_evidence_from_there(
    cluster: Cluster, project: Project
) -> None:
    job = project.train(*OPTIONS, "--supervise.spare_nodes=1", nodes=4)
    project.reach(job, 100)
    project.signal_ranks("node3", signal.SIGSTOP)
    project.wait_until(job, lambda: project.events("hang"), "the stopped rank is noticed")
    (stopped,) = project.events("hang")
    assert stopped["laggard"] == 2
    assert any(
        line.startswith("node3: ") and "T (stopped)" in line for line in stopped["processes"]
    )
    project.attempt(job, 2)
    project.reach(job, project.run.latest() + 40)
    cluster.cut("node2", "ib0", "silent")  # nothing is refused: TCP would try for a quarter hour
    project.wait_until(job, lambda: len(project.events("hang")) == 2, "the cut is noticed")
    _, cut = project.events("hang")
    assert cut["laggard"] == 1
    (suspect,) = project.events("suspect")
    assert suspect["node"] == "node2"
    assert "rank 1 on node2 is cut off" in suspect["reason"]
    for rank in (0, 2):  # the orders to others do not arrive
        assert "most recent call first" in project.run.record.stacks(2, rank).read_text()
    project.end(job, deadline=240)
    logs = [project.run.record.log(3, rank) for rank in range(3)]
    hosts = {e["host"] for log in logs for e in read_lines(log) if e["event"] == "ready"}
    assert hosts == {"node1", "node3", "node4"}  # the spare one took its place
    assert sorted(project.run.taken()) == list(range(8 * STEPS))


@pytest.mark.parametrize(
    ("limit", "attempts"),
    [
        pytest.param(NOTICED, 1, id="silent"),
        pytest.param(slowed(90.0), 2, id="gone", marks=pytest.mark.drill),
    ],
)
def test_a_node_that_loses_the_fabric_costs_a_requeue_without_it(
    cluster: Cluster, project: Project, undisturbed: Run, limit: float, attempts: int
) -> None:
    """With two nodes, no spare one and none to do without: ranks cannot start there again.

    Later than a hang is noticed, its links break: a start in vain tells why its rank is gone.
    """
    job = project.train(*LONG, f"--resilience.hang_timeout_min={limit}")
    project.reach(job, 31)
    cluster.cut("node2", "ib0", "cable")
    project.wait_until(job, lambda: project.events("requeued"), "the requeue", 180)
    assert project.run.attempt() == attempts
    project.end(job)
    (requeued,) = project.events("requeued")
    assert requeued["without"] == ["node2"]
    assert "without node2" in requeued["reason"]
    assert not project.events("gave_up")
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert_like(project.run, undisturbed)
