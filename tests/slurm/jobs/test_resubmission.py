"""A site where users may not requeue: a shim in front of scontrol refuses, as such a site does."""

from __future__ import annotations

import os
import shutil

import pytest
from harness import Run, wait_until
from lab import Cluster
from submitting import LONG, Project, assert_like

from kempner.cluster.slurm.hostlist import expand_hosts

pytestmark = [pytest.mark.timeout(300), pytest.mark.every_slurm]


def refusing(project: Project) -> str:
    """The PATH of such a site."""
    shim = project.folder / "bin" / "scontrol"
    shim.parent.mkdir()
    shim.write_text(
        '#!/bin/sh\n[ "$1" != requeue ] || { echo "Access/permission denied" >&2; exit 1; }\n'
        f'exec {shutil.which("scontrol")} "$@"\n'
    )
    shim.chmod(0o755)
    return f"{shim.parent}:{os.environ['PATH']}"


@pytest.mark.parametrize("who", ["site", "user"])
def test_a_job_that_may_not_be_requeued_is_submitted_again(
    cluster: Cluster, project: Project, undisturbed: Run, who: str
) -> None:
    environ = {"PATH": refusing(project)} if who == "site" else {}
    options = ("--no-requeue",) if who == "user" else ()
    job = project.train(*LONG, "--slurm.resubmit=true", options=options, **environ)
    project.reach(job, 5)
    project.warn(job)
    (told,) = wait_until(lambda: project.events("resubmitted"), "it is submitted again", 60)
    assert cluster.wait_for(job, "FAILED", "COMPLETED") == "FAILED"
    project.end(told["as_job"])
    again = cluster.job(told["as_job"])
    assert (again["NumNodes"], again["CPUs/Task"], again["Restarts"]) == ("2", "2", "0")
    assert len(project.events("resubmitted")) == 1
    assert_like(project.run, undisturbed)


@pytest.mark.drill
def test_after_a_lost_node_it_is_submitted_again_without_that_node(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    cluster.configure(slurmd_timeout=300)
    options = ("--slurm.resubmit=true", *LONG)
    job = project.train(*options, options=("--exclude=node8",), PATH=refusing(project))
    project.reach(job, 31)
    cluster.crash("node2")
    (told,) = wait_until(lambda: project.events("resubmitted"), "it is submitted again", 120)
    project.end(told["as_job"])
    excluded = cluster.job(told["as_job"])["ExcNodeList"]
    assert set(expand_hosts(excluded)) == {"node2", "node8"}
    assert_like(project.run, undisturbed)
