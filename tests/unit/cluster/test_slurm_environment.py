"""A process's place and resources, as Slurm tells them: tables over environments of a real 22.05.

`slurm_data/environments.json` was recorded on the cluster of tests/slurm.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.cluster.machine import JobPlace
from kempner.cluster.slurm.hostlist import expand_counts, expand_hosts
from kempner.cluster.slurm.resources import (
    Amount,
    WantedResources,
    count_gpus,
    detect,
    inherited,
    parse_memory,
)
from kempner.cluster.world import discover

DATA = Path(__file__).with_name("slurm_data")
SEEN: dict[str, dict[str, str]] = json.loads((DATA / "environments.json").read_text())


# Ranks


@pytest.mark.parametrize(
    ("seen", "rank", "size", "local_rank", "local_size"),
    [
        ("srun block, rank 5 of 2x4", 5, 8, 1, 4),
        ("srun cyclic, rank 5 of 2x4", 5, 8, 2, 4),
        ("srun uneven 2(x3),1, rank 6", 6, 7, 0, 1),
        ("srun on the second node of the job, rank 1", 1, 2, 1, 2),
        ("srun --gpus-per-task=1, rank 1", 1, 8, 1, 4),
        ("srun --gpus=6, rank 1 on node2", 1, 2, 0, 1),
        ("srun --overlap from outside, rank 1", 1, 2, 0, 1),
        ("srun without sbatch, rank 1", 1, 2, 0, 1),
        ("srun in an salloc shell, rank 7", 7, 8, 3, 4),
    ],
)
def test_a_task_of_a_step_is_a_rank(
    seen: str, rank: int, size: int, local_rank: int, local_size: int
) -> None:
    world = discover(SEEN[seen])
    assert (world.rank, world.size, world.local_rank, world.local_size) == (
        rank,
        size,
        local_rank,
        local_size,
    )
    assert (world.launcher, world.warning) == ("srun", "")


@pytest.mark.parametrize(
    "seen", ["sbatch 2x4", "sbatch uneven", "salloc shell", "array element 6", "sbatch --gpus=6"]
)
def test_python_outside_of_a_step_is_alone(seen: str) -> None:
    environ = next(e for name, e in SEEN.items() if name.startswith(seen))
    world = discover(environ)
    assert (world.rank, world.size, world.launcher, world.warning) == (0, 1, "none", "")


def test_the_place_is_told_under_torchs_names() -> None:
    world = discover(SEEN["srun cyclic, rank 5 of 2x4"])
    assert world.environment() == {
        "RANK": "5",
        "WORLD_SIZE": "8",
        "LOCAL_RANK": "2",
        "LOCAL_WORLD_SIZE": "4",
    }


STALE = {"RANK": "0", "WORLD_SIZE": "99"}


@pytest.mark.parametrize("seen", ["srun block, rank 5 of 2x4", "sbatch 2x4"])
def test_stale_variables_lose_to_slurm_with_a_warning(seen: str) -> None:
    world = discover({**SEEN[seen], **STALE})
    assert replace(world, warning="") == discover(SEEN[seen])
    assert "RANK=0 WORLD_SIZE=99 in the environment is ignored" in world.warning


def test_torchrun_inside_a_step_wins() -> None:
    placed = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    world = discover({**SEEN["srun block, rank 5 of 2x4"], **placed, "TORCHELASTIC_RUN_ID": "none"})
    assert (world.rank, world.size, world.launcher) == (2, 4, "torchrun")


@pytest.mark.parametrize(
    ("change", "culprit"),
    [
        ({"SLURM_PROCID": ""}, "SLURM_PROCID to something that is not a number"),
        ({"SLURM_PROCID": "8"}, "RANK=8 of 8"),
        ({"SLURM_LOCALID": "4"}, "LOCAL_RANK=4 of 4"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, r"SLURM_STEP_TASKS_PER_NODE=4\(x3\)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "'four' is not a Slurm list of counts"),
        ({"SLURM_STEP_NUM_TASKS": "eight"}, "'eight'"),
    ],
)
def test_a_contradictory_step_is_refused(change: dict[str, str], culprit: str) -> None:
    with pytest.raises(ValueError, match=culprit):
        discover({**SEEN["srun block, rank 5 of 2x4"], **change})


# Hosts


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", ["node1"]),
        ("node1,node2", ["node1", "node2"]),
        ("node[1-3]", ["node1", "node2", "node3"]),
        ("node[1,4-5]", ["node1", "node4", "node5"]),
        ("n[001-003]", ["n001", "n002", "n003"]),
        ("n[08-11]", ["n08", "n09", "n10", "n11"]),
        ("a,b[1-2],c", ["a", "b1", "b2", "c"]),
        ("n[1-2]-ib", ["n1-ib", "n2-ib"]),
        ("r[1-2]n[1-2]", ["r1n1", "r1n2", "r2n1", "r2n2"]),
        ("r[1,3]n[01-02]x,login", ["r1n01x", "r1n02x", "r3n01x", "r3n02x", "login"]),
        ("gpu-a[7].cluster", ["gpu-a7.cluster"]),
        ("[1-2]", ["1", "2"]),
    ],
)
def test_a_host_list_is_expanded(text: str, hosts: list[str]) -> None:
    assert expand_hosts(text) == hosts


@pytest.mark.parametrize("text", ["", "node[1-", "node1]", "n[3-1]", "n[a-b]", "n[]", "a,,b"])
def test_what_is_no_host_list_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm host list"):
        expand_hosts(text)


@pytest.mark.parametrize(
    ("text", "counts"),
    [("4", [4]), ("4(x2)", [4, 4]), ("2(x3),1", [2, 2, 2, 1]), ("1,3(x2),2", [1, 3, 3, 2])],
)
def test_counts_per_node_are_expanded(text: str, counts: list[int]) -> None:
    assert expand_counts(text) == counts


# Resources


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("4", 4),
        ("gpu:4", 4),
        ("gres:gpu:4", 4),
        ("gres/gpu:4", 4),
        ("gres/gpu=4", 4),
        ("gpu:h100:4", 4),
        ("h100:4", 4),
        ("gpu:h100:4(S:0-1)", 4),
        ("gpu:4(IDX:0-3)", 4),
        ("gpu:h100:2(S:0,2)", 2),
        ("gpu:a100:2,gpu:v100:2", 4),
        ("a100:2,v100:1", 3),
        ("gpu:nvidia_a100-sxm4.80gb:8", 8),
        ("gpu:4,nvme:1", 4),
        ("gres:gpu:h100:4,gres:nvme:2", 4),
        ("gres:nvme:2", 0),
        ("gres:gpu", 1),
        ("gpu:h100", 1),
        ("gres:gpu:1g.10gb:7", 7),
        ("gres/gpu:1g.10gb:7", 7),
        ("gres/gpu:nvidia_a100_1g.5gb=7", 7),
        ("gpu:1g.10gb+me:1,gpu:3g.40gb:1", 2),
        ("gpu:1c.2g.20gb:3(IDX:0-2)", 3),
        ("gpu:1g.10gb", 1),
        ("gres:gpu:mi300x:8", 8),
        ("gpu:2(IDX:0-1),shard:8(4/4)", 2),
        ("gpu:0", 0),
        ("(null)", 0),
        ("N/A", 0),
        ("", 0),
    ],
)
def test_every_spelling_of_gpus_is_counted(text: str, count: int) -> None:
    assert count_gpus(text) == count


@pytest.mark.parametrize("text", ["four", "gpu:4x", "4x", "gpu:4;2", ":4"])
def test_what_is_no_number_of_gpus_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="not a Slurm number of GPUs"):
        count_gpus(text)


@pytest.mark.parametrize(
    ("text", "mib"),
    [("4000", 4000), ("4000M", 4000), ("4G", 4096), ("1.5G", 1536), ("1T", 1 << 20), ("512K", 0)],
)
def test_memory_is_read_in_mib(text: str, mib: int) -> None:
    assert parse_memory(text) == mib


JOB = {"NumCPUs": "16", "NumNodes": "2", "MinMemoryNode": "8000M", "TresPerNode": "gres:gpu:4"}
NODE = {"RealMemory": "16000", "Gres": "gpu:h100:8(S:0-1)"}


@pytest.mark.parametrize(
    ("seen", "cpus", "memory_mb", "gpus"),
    [
        ("srun block, rank 5 of 2x4", (8, "ON_NODE"), (8000, "PER_NODE"), (4, "GPUS_ON_NODE")),
        ("srun uneven 2(x3),1, rank 6", (2, "ON_NODE"), (1000, "PER_CPU x 2"), (1, "ON_NODE")),
        ("sbatch uneven", (2, "ON_NODE"), (1000, "PER_CPU x 2"), (2, "GPUS_ON_NODE")),
        ("sbatch 2x4", (8, "ON_NODE"), (8000, "PER_NODE"), (4, "GPUS_ON_NODE")),
        ("sbatch --gpus=6 --mem-per-gpu", (1, "ON_NODE"), (4000, "PER_GPU x 4"), (4, "ON_NODE")),
        ("srun --gpus=6, rank 1 on node2", (1, "ON_NODE"), (2000, "PER_GPU x 2"), (2, "ON_NODE")),
        ("salloc shell", (4, "JOB_CPUS_PER_NODE"), (None, "not set"), (4, "GPUS_PER_NODE")),
        ("sbatch --gres=gpu:2 --mem=0", (1, "ON_NODE"), (None, "not set"), (2, "ON_NODE")),
    ],
)
def test_resources_come_from_the_environment(
    seen: str, cpus: tuple[int, str], memory_mb: tuple[int | None, str], gpus: tuple[int, str]
) -> None:
    found = detect(SEEN[seen])
    for amount, (value, source) in (
        (found.cpus, cpus),
        (found.memory_mb, memory_mb),
        (found.gpus, gpus),
    ):
        assert amount.value == value
        assert source in amount.source


@pytest.mark.parametrize(
    ("environ", "job", "node", "value", "source"),
    [
        ({"SLURM_MEM_PER_NODE": "0"}, {}, NODE, 16000, "SLURM_MEM_PER_NODE = 0: the whole node"),
        ({"SLURM_MEM_PER_NODE": "0"}, {}, {}, None, "SLURM_MEM_PER_NODE = 0: the whole node"),
        ({}, JOB, NODE, 8000, "scontrol show job: MinMemoryNode"),
        ({}, {"MinMemoryNode": "0"}, NODE, 16000, "MinMemoryNode = 0: the whole node"),
        ({"SLURM_CPUS_ON_NODE": "3"}, {"MinMemoryCPU": "2G"}, {}, 6144, "MinMemoryCPU x 3"),
        ({}, {}, NODE, 16000, "scontrol show node: RealMemory"),
    ],
)
def test_memory_falls_back_on_the_controller(
    environ: dict[str, str], job: dict[str, str], node: dict[str, str], value: int, source: str
) -> None:
    memory = detect(environ, job=job, node=node).memory_mb
    assert memory.value == value
    assert source in memory.source


@pytest.mark.parametrize(
    ("environ", "job", "node", "gpus"),
    [
        ({"SLURM_GPUS_PER_NODE": "h100:4"}, {}, {}, Amount(4, "SLURM_GPUS_PER_NODE")),
        (
            {"SLURM_GPUS_PER_TASK": "1", "SLURM_TASKS_PER_NODE": "2(x3),1", "SLURM_NODEID": "3"},
            {},
            {},
            Amount(1, "SLURM_GPUS_PER_TASK x tasks on this node"),
        ),
        ({}, JOB, NODE, Amount(4, "scontrol show job: TresPerNode")),
        ({"CUDA_VISIBLE_DEVICES": "0,3"}, {}, NODE, Amount(2, "CUDA_VISIBLE_DEVICES")),
        ({"CUDA_VISIBLE_DEVICES": ""}, {}, NODE, Amount(8, "scontrol show node: Gres")),
        ({}, {"NumCPUs": "1"}, NODE, Amount(None, "not set by Slurm or the configuration")),
        ({}, {}, {"Gres": "nvme:2"}, Amount(0, "scontrol show node: Gres")),
        ({}, {}, {"Gres": "(null)"}, Amount(0, "scontrol show node: Gres")),
    ],
)
def test_gpus_fall_back_in_order(
    environ: dict[str, str], job: dict[str, str], node: dict[str, str], gpus: Amount
) -> None:
    assert detect(environ, job=job, node=node).gpus == gpus


def test_what_is_configured_wins_and_says_so() -> None:
    found = detect(SEEN["sbatch 2x4"], configured=WantedResources(cpus=2, memory_mb=500, gpus=1))
    assert [str(amount) for amount in (found.cpus, found.memory_mb, found.gpus)] == [
        "2 (slurm.cpus)",
        "500 (slurm.memory_mb)",
        "1 (slurm.gpus_per_node)",
    ]


def test_cpus_fall_back_on_the_job() -> None:
    assert detect({}, job=JOB).cpus == Amount(8, "scontrol show job: NumCPUs / NumNodes")
    assert detect({}).cpus.value is None


# What came from the shell that submitted the job

PLAIN = {
    "Restarts": "0", "NtasksPerN:B:S:C": "0:0:*:*", "CPUs/Task": "1", "MinMemoryNode": "0",
}  # fmt: skip
"""What Slurm says of a job for which nothing was asked."""

ASKED = [
    ({"SLURM_NTASKS_PER_NODE": "4"}, {"NtasksPerN:B:S:C": "4:0:*:*"}),
    ({"SLURM_CPUS_PER_TASK": "2"}, {"CPUs/Task": "2"}),
    ({"SLURM_CPUS_PER_TASK": "1"}, {"CPUs/Task": "1", "TresPerTask": "cpu=1"}),
    ({"SLURM_GPUS_PER_NODE": "4"}, {"TresPerNode": "gres:gpu:4"}),
    ({"SLURM_GPUS_PER_NODE": "h100:4"}, {"TresPerNode": "gres/gpu:h100:4"}),
    ({"SLURM_GPUS_PER_TASK": "1"}, {"TresPerTask": "gres:gpu:1"}),
    ({"SLURM_GPUS_PER_TASK": "1"}, {"TresPerTask": "cpu=2,gres/gpu=1"}),
    ({"SLURM_GPUS_PER_SOCKET": "1"}, {"TresPerSocket": "gres/gpu:1"}),
    ({"SLURM_CPUS_PER_GPU": "1"}, {"CpusPerTres": "gres:gpu:1"}),
    ({"SLURM_GPU_BIND": "closest"}, {"TresBind": "gpu:closest"}),
    ({"SLURM_TRES_BIND": "gres/gpu:closest"}, {"TresBind": "gres/gpu:closest"}),
    ({"SLURM_MEM_PER_NODE": "4096"}, {"MinMemoryNode": "4G"}),
    ({"SLURM_MEM_PER_CPU": "500"}, {"MinMemoryCPU": "500M"}),
    ({"SLURM_MEM_PER_GPU": "1000"}, {"MemPerTres": "gres/gpu:1000"}),
    ({"SLURM_RESTART_COUNT": "2"}, {"Restarts": "2"}),
    (
        {"SLURM_ARRAY_JOB_ID": "7", "SLURM_ARRAY_TASK_ID": "0"},
        {"ArrayJobId": "7", "ArrayTaskId": "0"},
    ),
    ({"SLURM_HET_SIZE": "2"}, {"HetJobId": "7"}),
]
"""Variables, and what Slurm says of a job for which that was asked."""

TASK = {
    "SLURM_STEP_ID": "0", "SLURM_STEPID": "0", "SLURM_STEP_NODELIST": "node1",
    "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_TASKS_PER_NODE": "8", "SLURM_SRUN_COMM_HOST": "n",
    "SLURM_LABELIO": "1", "SLURM_DISTRIBUTION": "cyclic",
}  # fmt: skip
"""What srun tells a task."""


def test_what_was_asked_for_in_a_job_is_about_it() -> None:
    for environ, fields in ASKED:
        assert inherited({**environ, "SLURM_JOB_ID": "7"}, PLAIN | fields) == set()
    every = {name: value for environ, _ in ASKED for name, value in environ.items()}
    assert inherited({"SLURM_MEM_PER_NODE": "0"}, PLAIN) == set()  # --mem=0
    assert inherited(every, PLAIN) == set(every)


@pytest.mark.parametrize("own", range(len(ASKED)))
@pytest.mark.parametrize("leaked", range(len(ASKED)))
@pytest.mark.parametrize("step", [{}, TASK], ids=["", "in a step"])
def test_what_the_submitting_shell_had_is_not(own: int, leaked: int, step: dict[str, str]) -> None:
    """A job with one request, submitted in a job with another, from a step or not."""
    (variables, fields), (others, _) = ASKED[own], ASKED[leaked]
    environ = {**step, **others, **variables, "PATH": "/bin", "SLURM_JOB_ID": "7"}
    told = inherited(environ, PLAIN | fields)
    assert told == (set(others) - set(variables) | set(step)) - _also_fits(others, fields)


def _also_fits(others: dict[str, str], fields: dict[str, str]) -> set[str]:
    """Those that say what was asked for by chance: nothing is wrong with them."""
    return {name for name in others if not inherited({name: others[name]}, PLAIN | fields)}


@pytest.mark.parametrize("tasks", ["1", "8"])
def test_a_batch_script_submitted_from_within_a_step_is_no_rank(
    monkeypatch: pytest.MonkeyPatch, tasks: str
) -> None:
    environ = {**TASK, "SLURM_STEP_NUM_TASKS": tasks, "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    monkeypatch.setattr("kempner.cluster.world.find_place", lambda environ: JobPlace.BATCH_SCRIPT)
    assert discover({**environ, "SLURM_NODEID": "0"}).launcher == "none"
