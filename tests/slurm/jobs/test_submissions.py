"""What a submission hands on to the ranks, and what is refused before any of them starts."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from lab import Cluster
from submitting import Project

pytestmark = pytest.mark.timeout(300)


def refused(project: Project, job: str) -> str:
    """What a job that was refused printed: one sentence, and nothing of Python's."""
    project.end(job, "FAILED")
    (sentence,) = project.log(job).splitlines()
    return sentence


def test_what_makes_no_sense_is_refused_in_one_sentence(project: Project) -> None:
    tiny = str(project.run.config.relative_to(project.folder))
    one = ("--nodes=1",)
    jobs = {
        project.submit("multinode.sh", options=one): "usage: sbatch",
        project.submit("singlenode.sh", "nowhere.toml"): "no configuration nowhere.toml",
        project.submit(
            "multinode.sh", tiny, options=(*one, "--ntasks-per-node=4", "--gpus-per-node=2")
        ): "--ntasks-per-node=4 but 2 GPUs per node",
        project.submit("multinode.sh", tiny, options=(*one, ":", *one)): "is heterogeneous",
        project.submit(
            "multinode.sh", tiny, "--supervise.control_interface=ib7", options=one
        ): "supervise.control_interface=ib7 does not exist on this node; it has ib0 (10.10.0.1",
    }
    for job, words in jobs.items():
        assert words in refused(project, job)
        assert project.cluster.job(job)["ExitCode"] == "2:0"


def test_a_submission_reaches_the_ranks_unchanged(project: Project, corpus: Path) -> None:
    """An argument with a space in it, and the CPUs, which srun does not take over by itself."""
    spaced = project.folder / "my tokens"
    shutil.copytree(corpus, spaced)
    job = project.train(f"--data.dataset_path={spaced}", "--train.max_steps=2")
    project.end(job)
    assert set(project.run.steps()) == {1, 2}
    (step,) = (
        r for r in project.cluster.sacct(job, "JobID", "AllocCPUS") if r["JobID"] == f"{job}.0"
    )
    assert step["AllocCPUS"] == "4"  # two for each of two ranks


def test_data_that_is_missing_is_named_before_the_first_step(
    project: Project, cluster: Cluster
) -> None:
    """configs/train/7b.toml as it is, on a cluster where its data is not prepared."""
    config = "configs/train/7b.toml"
    checked = cluster.run(
        "node1",
        *(sys.executable, "-m", "kempner", "config", "check", config),
        cwd=project.folder,
        check=False,
    )
    assert checked.stdout.startswith("kempner: data.dataset_path=")
    job = project.submit("multinode.sh", config, options=("--nodes=2",))
    project.end(job, "FAILED")
    assert cluster.job(job)["ExitCode"] == "65:0"
    assert "data.dataset_path" in project.log(job)
    assert "Traceback" not in project.log(job)
