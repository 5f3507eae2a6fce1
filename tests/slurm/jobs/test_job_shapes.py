"""However a job asks for its GPUs, each of them gets a rank, and the ranks find each other."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from lab import Cluster
from submitting import Project

from kempner.lab.machines import address

pytestmark = pytest.mark.timeout(300)

PLACE = (
    "echo place $RANK $WORLD_SIZE $LOCAL_RANK $LOCAL_WORLD_SIZE $SLURMD_NODENAME $MASTER_ADDR "
    "gpus=$CUDA_VISIBLE_DEVICES"
)
SUPERVISE = [sys.executable, "-m", "kempner", "supervise", "--run.name=shape"]
SCRIPT = """#!/bin/bash
#SBATCH --nodes=2 --requeue --output=logs/%j_shape.out
exec {command}
"""


@dataclass(frozen=True)
class Place:
    rank: int
    size: int
    local_rank: int
    local_size: int
    node: str
    master: str
    gpus: tuple[str, ...]


def places(text: str) -> list[Place]:
    found = re.findall(r"^place (\d+) (\d+) (\d+) (\d+) (\S+) (\S+) gpus=(\S*)$", text, re.M)
    read = [
        Place(*map(int, words[:4]), words[4], words[5], tuple(filter(None, words[6].split(","))))  # type: ignore[arg-type,misc,call-arg]
        for words in found
    ]
    return sorted(read, key=lambda place: place.rank)


def assert_placed(text: str, *per_node: int) -> None:
    """`per_node` ranks on node1, node2, ..., in this order, each beside as many GPUs."""
    found, size = places(text), sum(per_node)
    assert [place.rank for place in found] == list(range(size)), text
    assert {place.size for place in found} == {size}
    on = {f"node{n}": count for n, count in enumerate(per_node, 1)}
    assert Counter(place.node for place in found) == on
    for node, count in on.items():
        here = [place for place in found if place.node == node]
        assert [(p.local_rank, p.local_size) for p in here] == [(n, count) for n in range(count)]
        assert {len(place.gpus) for place in here} == {count}
    assert {place.master for place in found} == {address(found[0].node, "ib0")}


def run_command(project: Project, *options: str, overrides: tuple[str, ...] = ()) -> str:
    """A job with a command of the user's; what it has printed in the end."""
    words = [*SUPERVISE, *overrides, "--launcher", "srun", "--", "bash", "-c", PLACE]
    (project.folder / "shape.sh").write_text(SCRIPT.format(command=shlex.join(words)))
    job = project.cluster.sbatch(
        "--nodelist=node[1-2]", *options, "shape.sh", cwd=project.folder, OMP_NUM_THREADS="1"
    )
    project.end(job)
    return project.log(job)


@pytest.mark.every_slurm
@pytest.mark.parametrize(
    ("options", "per_node"),
    [
        ("--gpus-per-node=4 --ntasks-per-node=4 --cpus-per-task=2", (4, 4)),
        ("--gres=gpu:2 --ntasks-per-node=2 --cpus-per-task=2 --mail-type=END", (2, 2)),
        ("--gpus=8 --cpus-per-gpu=2", (4, 4)),
        ("--gpus=6 --cpus-per-gpu=2", (4, 2)),  # 22.05 makes no step of both nodes' GPUs
        ("--ntasks=8 --gpus-per-task=1", (4, 4)),
        ("--gpus=8 --ntasks-per-gpu=1", (4, 4)),
        ("--gpus=8 --ntasks=8", (4, 4)),  # with 7 CPUs and 1
        ("--gpus-per-node=4", (4, 4)),  # with one CPU on each node
    ],
)
def test_each_gpu_has_a_rank(project: Project, options: str, per_node: tuple[int, ...]) -> None:
    assert_placed(run_command(project, *options.split()), *per_node)


@pytest.mark.every_slurm
@pytest.mark.parametrize("fork", ["true", "false"])
def test_a_rank_sees_the_gpus_of_its_node_though_they_are_asked_for_by_task(
    project: Project, fork: str
) -> None:
    """From 24.11 on Slurm binds each task to its own by itself."""
    options = ("--ntasks-per-node=4", "--gpus-per-task=1", "--cpus-per-task=1")
    told = run_command(project, *options, overrides=(f"--supervise.fork={fork}",))
    assert_placed(told, 4, 4)


def test_the_master_is_the_node_of_rank_0_though_another_is_preferred(project: Project) -> None:
    """node1 is suspect, and used all the same: srun has its own order of the nodes."""
    (project.folder / "group").mkdir()
    suspect = '{"node": "node1", "reason": "slow", "since": 1, "until": 9e9, "run": "other"}'
    (project.folder / "group" / "node1.json").write_text(suspect)
    shared = f"--resilience.suspects_dir={project.folder / 'group'}"
    told = run_command(project, "--gpus-per-node=1", "--cpus-per-task=2", overrides=(shared,))
    assert "node1 is suspect, and used anyway: slow" in told
    assert_placed(told, 1, 1)


def test_a_rank_for_each_gpu_of_somebody_elses_allocation(
    project: Project, cluster: Cluster
) -> None:
    asked = ("--nodes=2", "--nodelist=node[1-2]", "--gpus=8", "--cpus-per-gpu=1")
    cluster.run("login1", "salloc", "--no-shell", *asked)
    job = cluster.run("login1", "squeue", "-h", "-o", "%i").stdout.strip()
    command = [*SUPERVISE, "--jobid", job, "--launcher", "srun", "--", "bash", "-c", PLACE]
    told = cluster.run("login1", *command, cwd=project.folder, timeout=120, TERM="dumb").stdout
    assert_placed(told, 4, 4)
    assert cluster.squeue(job) == "RUNNING"


@pytest.mark.parametrize(
    ("script", "ranks"), [("singlenode.sh", 4), ("multinode.sh", 8), ("torchrun.sh", 8)]
)
def test_a_script_runs_as_it_is_shipped(
    project: Project, cluster: Cluster, script: str, ranks: int
) -> None:
    """On nodes of four GPUs and 32 CPUs, with no resource named."""
    cluster.configure(cpus=32)
    config = str(project.run.config.relative_to(project.folder))
    job = cluster.sbatch(
        f"scripts/slurm/{script}",
        config,
        "--train.max_steps=2",
        cwd=project.folder,
        KEMPNER_PYTHON=sys.executable,
        OMP_NUM_THREADS="1",
    )
    project.end(job, deadline=280)
    assert f"{ranks} ranks, 4 per node" in project.log(job)
    (started,) = project.events("attempt_started")
    assert started["ranks"] == ranks
    assert list(project.run.steps()) == [1, 2]
