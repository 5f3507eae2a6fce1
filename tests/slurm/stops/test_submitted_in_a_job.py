"""A job that is submitted from within another one has that one's variables, and is none of it."""

from __future__ import annotations

import shlex
import sys

import pytest
from harness import wait_until
from submitting import Project

pytestmark = pytest.mark.timeout(300)

OUTER = (
    *("--array=5", "--nodes=1", "--nodelist=node8", "--ntasks-per-node=4", "--gpus-per-node=4"),
    *("--cpus-per-task=2", "--mem=4G", "--gpu-bind=closest", "--output=/dev/null"),
)
"""As unlike the inner job as can be."""

INNER = (
    "sbatch --parsable --nodes=2 --gpus=2 --exclude=node8 --requeue --open-mode=append "
    "--output=logs/%j_inner.out inner.sh > inner.id"
)


@pytest.mark.every_slurm
def test_it_has_its_own_shape_and_name_and_is_requeued_itself(project: Project) -> None:
    config = str(project.run.config.relative_to(project.folder))
    train = [sys.executable, "-m", "kempner", "supervise", "--launcher", "srun", config]
    (project.folder / "inner.sh").write_text(
        f"#!/bin/sh\nexport OMP_NUM_THREADS=1\nexec {shlex.join(train)} --train.max_steps=120\n"
    )
    step = f"test $SLURM_PROCID != 0 || {INNER}"
    wrap = f"--wrap=srun --label --distribution=cyclic --ntasks=4 sh -c {shlex.quote(step)}"
    outer = project.cluster.sbatch(*OUTER, wrap, cwd=project.folder)
    told = project.folder / "inner.id"
    wait_until(lambda: told.is_file() and told.read_text().endswith("\n"), "the inner job", 60)
    job = told.read_text().strip()
    project.reach(job, 5)
    project.warn(job)
    project.wait_until(job, lambda: project.events("requeued"), "the requeue")
    (requeued,) = project.events("requeued")
    assert requeued["job"] == job  # and not the element of the outer one
    project.end(job)
    (first, *_) = project.events("attempt_started")
    assert (first["ranks"], first["restarts"]) == (2, 0)
    assert "SLURM_GPUS_PER_NODE" in project.log(job)  # it says what it ignores
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert project.cluster.job(f"{outer}_5")["Restarts"] == "0"
