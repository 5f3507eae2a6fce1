"""Which network carries what, as the kernels of the nodes tell it while jobs train."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from lab import Cluster
from submitting import LONG, Project

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(300)

CONTROL = "14000"
SOCKET = re.compile(r"\S+ (\S+):\d+ (\S+):(\d+) users:.*,pid=(\d+),")


def connections(cluster: Cluster, node: str, pid: int) -> list[tuple[str, str, str]]:
    """The near and the far address, and the far port, of each connection of a process."""
    told = cluster.run(node, "ss", "-tnpH", "state", "established").stdout
    found = SOCKET.findall(re.sub(" +", " ", told))
    return [(_plain(near), _plain(far), port) for near, far, port, p in found if int(p) == pid]


def _plain(address: str) -> str:
    return address.strip("[]").removeprefix("::ffff:")


def test_two_jobs_share_nodes_and_keep_to_their_networks(
    cluster: Cluster, project: Project, corpus: Path
) -> None:
    cluster.configure(open_management=True)
    other = Project.make(cluster, project.folder.with_name("other"), corpus)
    jobs = [
        (
            each,
            control,
            each.train(*LONG, f"--supervise.control_ports={CONTROL}-{CONTROL}", *chosen),
        )
        for each, control, chosen in (
            (project, "em4", ["--supervise.control_interface=em4"]),
            (other, "ib0", ["--supervise.control_interface=ib0"]),
        )
    ]
    for each, _, job in jobs:
        each.reach(job, 31)  # by then a checkpoint is committed, by a group of its own
    for each, control, _ in jobs:
        (pid,) = (e["pid"] for e in read_lines(each.run.record.log(1, 1)) if e["event"] == "ready")
        found = connections(cluster, "node2", pid)
        told = Counter((network(cluster, *ends), port == CONTROL) for *ends, port in found)
        # Two groups to vote and to save, the one that trains, and the store.
        assert told == {("ib0", False): 4}
        (agent,) = (e["pid"] for e in agents(each) if e["node"] == "node2")
        found = connections(cluster, "node2", agent)
        assert [(network(cluster, *ends), port) for *ends, port in found] == [(control, CONTROL)]
    assert not any(each.events("attempt_ended") for each, _, _ in jobs)  # all at the same time
    for each, _, job in jobs:
        each.end(job)
    assert project.run.steps() == other.run.steps()


def agents(project: Project) -> list[dict[str, Any]]:
    """Each of a run that has connected."""
    log = read_lines(project.run.record.supervisor_log(1))
    return [line for line in log if line["event"] == "agent connected"]


def network(cluster: Cluster, near: str, far: str) -> str:
    """The interface on both ends of a connection between node2 and node1."""
    (name,) = (
        name
        for name in ("em4", "ib0")
        if (near, far) == (cluster.address("node2", name), cluster.address("node1", name))
    )
    return name


def test_where_the_fabric_is_down_at_the_start_names_lead_the_way(
    project: Project, cluster: Cluster
) -> None:
    cluster.configure(open_management=True)
    for node in ("node1", "node2"):
        cluster.cut(node, "ib0", "cable")
    job = project.train("--train.max_steps=3")
    project.end(job)
    assert "agents do not connect" not in project.log(job)
    log = read_lines(project.run.record.supervisor_log(1))
    assert sorted(e["rank"] for e in log if e["event"] == "rank connected") == [0, 1]


@pytest.mark.drill
def test_a_node_off_the_fabric_is_named_in_the_jobs_log(project: Project, cluster: Cluster) -> None:
    """`make check` has what every rank says of it: test_meeting.py."""
    cluster.cut("node2", "ib0", "admin")
    job = project.train()
    project.end(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "2:0"
    log = project.log(job)
    assert "fix the interface of node2, leave it out with `sbatch --exclude`" in log
    assert "Traceback" not in log
    assert project.run.steps() == {}
