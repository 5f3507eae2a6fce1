"""A job, submitted as a researcher does, finishes whatever Slurm does to it."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from drilling import note
from harness import Run, wait_until
from submitting import TINY_OF_7B, Project, assert_like

pytestmark = pytest.mark.timeout(600)


def test_eight_nodes_train_the_7b_configuration_made_tiny(project: Project, corpus: Path) -> None:
    data = [f"--data.dataset_path={corpus}", f"--eval.dataset_path={corpus}"]
    job = project.submit(
        "multinode.sh", "configs/train/7b.toml", *TINY_OF_7B, *data,
        f"--run.dir={project.folder / 'tiny' / 'runs'}", "--run.name=run",
        options=("--nodes=8",),
    )  # fmt: skip
    project.end(job, deadline=300)
    assert "Restart cnt: 0" in project.log(job)
    assert "8 nodes (node1,node2,node3,node4,node5,node6,node7,node8), 8 ranks" in project.log(job)
    assert len(project.run.steps()) == 30


@pytest.mark.drill
def test_eight_nodes_lose_what_eight_local_ranks_lose(
    project: Project, reference: Run, corpus: Path
) -> None:
    """`make check` compares two nodes with two local ranks: tests/slurm/stops."""
    data = [f"--data.dataset_path={corpus}", f"--eval.dataset_path={corpus}"]
    job = project.submit(
        "multinode.sh", "configs/train/7b.toml", *TINY_OF_7B, *data,
        f"--run.dir={project.folder / 'tiny' / 'runs'}", "--run.name=run",
        options=("--nodes=8",),
    )  # fmt: skip
    project.end(job, deadline=300)
    reference.config.write_text((project.folder / "configs/train/7b.toml").read_text())
    reference.complete(
        8, *TINY_OF_7B, *data, f"--run.dir={reference.folder / 'runs'}", "--run.name=run"
    )
    assert project.run.steps() == reference.steps()
    assert len(reference.steps()) == 30


@pytest.mark.drill
def test_a_warned_job_comes_back_and_goes_on(project: Project, reference: Run) -> None:
    """What --signal=B:SIGTERM@120 does, at a moment of our choosing.

    `make check` has it in tests/slurm/stops, and with the other scripts in test_other_launchers.py.
    """
    job = project.train("--train.max_steps=40")
    project.reach(job, 5)
    project.cluster.run("login1", "scancel", "--batch", "--signal=TERM", job)
    wait_until(lambda: project.cluster.job(job)["Restarts"] == "1", "the job is requeued", 60)
    project.end(job)
    project.assert_states(job, "REQUEUED", "COMPLETED")
    assert "Restart cnt: 1" in project.log(job)
    (requeued,) = project.events("requeued")
    (resumed,) = project.events("resumed")
    assert resumed["step"] == requeued["step"]
    reference.complete(2)
    assert_like(project.run, reference)


@pytest.mark.drill
@pytest.mark.timeout(1200)
def test_eight_nodes_of_four_ranks_each_are_warned_and_lose_a_rank(project: Project) -> None:
    """`make check` has both with fewer ranks: tests/slurm/stops and tests/slurm/faults."""
    steps, batch = 40, 32
    job = project.train(
        f"--train.max_steps={steps}",
        f"--train.global_batch_size={batch}",
        *("--train.micro_batch_size=1", "--checkpoint.interval=5"),
        nodes=8,
        options=("--ntasks-per-node=4", "--gpus-per-node=4", "--cpus-per-task=2"),
    )
    project.reach(job, 8, deadline=400)
    project.warn(job)
    project.wait_until(job, lambda: project.events("requeued"), "the requeue", 200)
    project.attempt(job, 2)
    (requeued,) = project.events("requeued")
    project.reach(job, requeued["step"] + 7, deadline=400)
    os.kill(project.ranks("node5")[1], signal.SIGKILL)
    project.end(job, deadline=600)
    assert [e["ranks"] for e in project.events("attempt_started")] == [32, 32, 32]
    (stopped,) = project.events("stopped")
    assert stopped["lost_steps"] == 0
    failed = project.events("attempt_failed")
    assert [event["node"] for event in failed] == ["node5"]
    assert sorted(project.run.taken()) == list(range(batch * steps))
    made = max(line["step"] for line in project.run.metrics() if line["attempt"] == 2)
    begun = [event["time"] for event in project.events("ready_to_train")]
    starts = [event["time"] for event in project.events("attempt_started")]
    note(
        "eight nodes of four ranks",
        steps_made_again=made - failed[0]["committed"],
        seconds_to_first_step=[round(b - s, 1) for s, b in zip(starts, begun, strict=True)],
    )
