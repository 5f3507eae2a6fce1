"""Ends that prove nothing: a configuration that is half saved when the job comes back, steps that
Slurm does not start, a job that is held. And the one that does: a complete run."""

from __future__ import annotations

import os
import shutil
import sys

import pytest
from harness import Run, wait_until
from lab import Cluster
from submitting import LONG, Project, assert_like

pytestmark = pytest.mark.timeout(900)

REFUSED = "Unable to create step for job 0: Invalid generic resource (gres) specification"


def refusing(project: Project) -> str:
    """A PATH whose srun is refused by Slurm as long as there is a file `refuse`."""
    shim = project.folder / "bin" / "srun"
    shim.parent.mkdir()
    shim.write_text(
        f'#!/bin/sh\n[ ! -e {project.folder}/refuse ] || {{ echo "srun: error: {REFUSED}" >&2; '
        f'exit 1; }}\nexec {shutil.which("srun")} "$@"\n'
    )
    shim.chmod(0o755)
    return f"{shim.parent}:{os.environ['PATH']}"


@pytest.mark.every_slurm
def test_what_proves_no_end_is_none_and_a_complete_run_starts_nothing(
    cluster: Cluster, project: Project, undisturbed: Run
) -> None:
    path, config = refusing(project), project.run.config
    job = project.train(*LONG, PATH=path)
    project.reach(job, 5)
    good = config.read_text()
    config.write_text(good[: good.index("max_steps") + 11])  # an editor is killed
    (project.folder / "refuse").touch()
    project.warn(job)
    project.attempt(job, 2)
    assert "the configuration that worked last" in project.log(job)
    requeued = lambda: len(project.events("requeued")) == 2  # noqa: E731
    project.wait_until(job, requeued, "it is requeued once more", 300)
    assert "Invalid generic resource" in project.log(job)
    assert not project.events("attempt_failed")

    cluster.scontrol("hold", job)
    command = [sys.executable, "-m", "kempner", "status", job]
    said = lambda: cluster.run("login1", *command, cwd=project.folder).stdout  # noqa: E731
    wait_until(lambda: "an administrator holds it" in said(), "it is told as held", 60)
    (project.folder / "refuse").unlink()
    cluster.scontrol("release", job)
    project.end(job, deadline=300)
    assert_like(project.run, undisturbed)

    config.write_text(good)
    attempts = project.run.attempt()
    again = project.train(*LONG, PATH=path)
    project.end(again)
    assert "is complete, and nothing has changed since" in project.log(again)
    assert project.run.attempt() == attempts
