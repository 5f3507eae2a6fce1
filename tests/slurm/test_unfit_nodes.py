"""A node that is up, and not fit to train on: found before ranks are started there."""

from __future__ import annotations

import pytest
from harness import Run
from lab import Cluster
from submitting import LONG, Project, assert_like

pytestmark = pytest.mark.timeout(300)


def test_a_node_that_does_not_see_the_runs_folder_is_left_out(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    runs = project.run.folder / "runs"
    runs.mkdir()
    cluster.run("node2", "mount", "-t", "tmpfs", "tmpfs", str(runs))
    try:
        job = project.train(*LONG, "--supervise.spare_nodes=1", nodes=3)
        project.end(job)
    finally:
        cluster.run("node2", "umount", str(runs))
    (suspect,) = project.events("suspect")
    assert suspect["node"] == "node2"
    assert "not the folder of that name on the supervisor's node" in suspect["reason"]
    assert "node2 is suspect, and left out" in project.log(job)
    assert [e["ranks"] for e in project.events("attempt_started")] == [2]
    assert_like(project.run, undisturbed)
