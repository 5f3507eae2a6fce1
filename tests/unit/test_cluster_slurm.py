"""What kempner reads out of Slurm: tables over environments and answers of a real 22.05.

`slurm_data/environments.json` and `jobs.json` were recorded on the cluster of tests/slurm.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from kempner.cluster.hosts import expand_counts, expand_hosts, node_of
from kempner.cluster.job import (
    Event,
    classify,
    job_fields,
    job_id,
    node_fields,
    parse_job,
    restart_count,
)
from kempner.cluster.resources import Amount, Wanted, count_gpus, detect, parse_memory
from kempner.cluster.world import discover

DATA = Path(__file__).with_name("slurm_data")
SEEN: dict[str, dict[str, str]] = json.loads((DATA / "environments.json").read_text())
JOBS: dict[str, str] = json.loads((DATA / "jobs.json").read_text())


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
        ({"SLURM_PROCID": ""}, "SLURM_PROCID to no number"),
        ({"SLURM_PROCID": "8"}, "RANK=8 of 8"),
        ({"SLURM_LOCALID": "4"}, "LOCAL_RANK=4 of 4"),
        ({"SLURM_NODEID": "2"}, "SLURM_NODEID=2"),
        ({"SLURM_STEP_TASKS_PER_NODE": "4(x3)"}, r"SLURM_STEP_TASKS_PER_NODE=4\(x3\)"),
        ({"SLURM_STEP_TASKS_PER_NODE": "four"}, "'four' is no list of counts"),
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
    with pytest.raises(ValueError, match="no host list"):
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
    with pytest.raises(ValueError, match="no number of GPUs"):
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
        ("salloc shell", (4, "JOB_CPUS_PER_NODE"), (None, "neither"), (4, "GPUS_PER_NODE")),
        ("sbatch --gres=gpu:2 --mem=0", (1, "ON_NODE"), (None, "neither"), (2, "ON_NODE")),
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
        ({}, {"NumCPUs": "1"}, NODE, Amount(None, "neither Slurm nor the configuration says")),
        ({}, {}, {"Gres": "nvme:2"}, Amount(0, "scontrol show node: Gres")),
        ({}, {}, {"Gres": "(null)"}, Amount(0, "scontrol show node: Gres")),
    ],
)
def test_gpus_fall_back_in_order(
    environ: dict[str, str], job: dict[str, str], node: dict[str, str], gpus: Amount
) -> None:
    assert detect(environ, job=job, node=node).gpus == gpus


def test_what_is_configured_wins_and_says_so() -> None:
    found = detect(SEEN["sbatch 2x4"], configured=Wanted(cpus=2, memory_mb=500, gpus=1))
    assert [str(amount) for amount in (found.cpus, found.memory_mb, found.gpus)] == [
        "2 (slurm.cpus)",
        "500 (slurm.memory_mb)",
        "1 (slurm.gpus_per_node)",
    ]


def test_cpus_fall_back_on_the_job() -> None:
    assert detect({}, job=JOB).cpus == Amount(8, "scontrol show job: NumCPUs / NumNodes")
    assert detect({}).cpus.value is None


# The job


def test_a_job_is_read() -> None:
    job = parse_job(job_fields(JOBS["running"]))
    assert (job.id, job.state, job.reason, job.restarts) == ("1", "RUNNING", "", 0)
    assert (job.node_list, job.batch_host) == ("node[1-2]", "node1")
    assert job.may_requeue
    assert job.running
    assert job.time_limit == 3600
    assert job.end_time is not None
    assert job.preempt_time is None


def test_the_requeue_flag_and_the_array_are_read() -> None:
    assert not parse_job(job_fields(JOBS["no requeue"])).may_requeue
    element = parse_job(job_fields(JOBS["array element"]))
    assert (element.id, element.array_id, element.array_task) == ("4", "3", "5")


@pytest.mark.parametrize(("flag", "batch"), [("0", False), ("1", True), ("2", True)])
def test_a_job_whose_launch_once_failed_is_still_a_batch_job(flag: str, batch: bool) -> None:
    shown = JOBS["running"].replace("BatchFlag=1", f"BatchFlag={flag}")
    assert parse_job(job_fields(shown)).batch is batch


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("JobName=train", "JobName=x JobState=CANCELLED Restarts=9"),
        ("JobName=train", "JobName=x UserId=me JobState=CANCELLED"),
        ("Command=(null)", "Command=/run.sh JobState=CANCELLED Restarts=9"),
        ("WorkDir=/home/user", "WorkDir=/home/my JobState=FAILED dir"),
    ],
)
def test_what_the_user_chose_cannot_pose_as_a_field(old: str, new: str) -> None:
    assert old in JOBS["running"]
    assert parse_job(job_fields(JOBS["running"].replace(old, new))) == parse_job(
        job_fields(JOBS["running"])
    )


@pytest.mark.parametrize(
    ("text", "seconds"), [("00:02:00", 120.0), ("2-01:30:00", 178200.0), ("UNLIMITED", None)]
)
def test_a_time_limit_is_read(text: str, seconds: float | None) -> None:
    shown = JOBS["running"].replace("TimeLimit=01:00:00", f"TimeLimit={text}")
    assert parse_job(job_fields(shown)).time_limit == seconds


def test_the_answer_about_no_job_is_refused() -> None:
    with pytest.raises(ValueError, match="without JobId and JobState"):
        parse_job(job_fields("No jobs in the system\n"))


def test_of_several_jobs_the_first_is_read() -> None:
    both = f"{JOBS['array element']}\n{JOBS['waiting again']}\n"
    assert job_fields(both) == job_fields(JOBS["array element"])


@pytest.mark.parametrize(
    ("shown", "gpus"), [("running", 4), ("gpus per node", 2), ("gpus per job", None)]
)
def test_the_controllers_answer_tells_the_resources(shown: str, gpus: int | None) -> None:
    assert detect({}, job=job_fields(JOBS[shown])).gpus.value == gpus


def test_a_node_is_read() -> None:
    node = node_fields(
        "NodeName=n1 OS=Linux 6.1.0 #1 SMP Debian Gres=gpu:h100:4(S:0-1) RealMemory=16000 "
        "State=IDLE Comment=was Gres=gpu:8 \n"
    )
    assert (node["Gres"], node["RealMemory"], node["OS"]) == ("gpu:h100:4(S:0-1)", "16000", "Linux")


@pytest.mark.parametrize(
    ("before", "now", "warned", "event"),
    [
        ("running", "running", False, Event.NOTHING),
        ("running", "running", True, Event.TIME_LIMIT),
        ("before the preemption", "preempted", False, Event.PREEMPTION),
        ("before the preemption", "preempted", True, Event.PREEMPTION),
        ("before the cancel", "cancelled", True, Event.CANCEL),
        ("before the requeue", "requeued", True, Event.REQUEUE),
        ("before the requeue", "waiting again", False, Event.REQUEUE),
        ("before the limit", "limit reached", True, Event.TIME_LIMIT_REACHED),
        ("before the limit", "timed out", False, Event.TIME_LIMIT_REACHED),
    ],
)
def test_what_happens_is_told_from_two_looks(
    before: str, now: str, warned: bool, event: Event
) -> None:
    assert (
        classify(parse_job(job_fields(JOBS[before])), parse_job(job_fields(JOBS[now])), warned)
        is event
    )


@pytest.mark.parametrize(
    ("state", "event"), [("COMPLETED", Event.ENDED), ("CANCELLED", Event.CANCEL)]
)
def test_a_job_that_is_over_is_not_to_be_requeued(state: str, event: Event) -> None:
    before = parse_job(job_fields(JOBS["running"]))
    now = replace(before, state=state)
    assert classify(before, now) is event
    assert not now.running


def test_a_preempted_job_ends_when_its_grace_time_does() -> None:
    before, now = (
        parse_job(job_fields(JOBS["before the preemption"])),
        parse_job(job_fields(JOBS["preempted"])),
    )
    assert now.running
    assert now.preempt_time is not None
    assert before.end_time is not None
    assert now.end_time == now.preempt_time + 20 < before.end_time


@pytest.mark.parametrize(
    ("seen", "spoken"),
    [
        ("sbatch 2x4", "1"),
        ("srun block, rank 5 of 2x4", "1"),
        ("salloc shell", "10"),
        ("array element 6", "3_6"),
        ("array element 7", "3_7"),
    ],
)
def test_a_job_is_spoken_of_by_the_right_id(seen: str, spoken: str) -> None:
    assert job_id(SEEN[seen]) == spoken


def test_the_element_that_carries_the_arrays_id_speaks_of_itself() -> None:
    last = SEEN["array element 7"]
    assert last["SLURM_JOB_ID"] == last["SLURM_ARRAY_JOB_ID"]
    assert job_id(last) == "3_7"


@pytest.mark.parametrize("seen", ["het job", "srun across a het job, rank 2"])
def test_a_heterogeneous_job_is_refused(seen: str) -> None:
    with pytest.raises(ValueError, match=r"job 8 is heterogeneous .*: submit it with one set"):
        job_id(SEEN[seen])


def test_outside_of_a_job_there_is_no_id() -> None:
    assert job_id({}) is None


def test_the_first_run_of_a_job_has_no_restart_count() -> None:
    assert restart_count(SEEN["sbatch 2x4"]) == 0
    assert restart_count({"SLURM_RESTART_COUNT": "2"}) == 2


@pytest.mark.parametrize(
    ("host", "node"),
    [
        ("node1", "node1"),
        ("node1.cluster.example", "node1"),
        ("node10", "node10"),
        ("node12.cluster.example", "node12.cluster.example"),
        ("", ""),
    ],
)
def test_a_host_is_the_node_of_that_name_with_or_without_a_domain(host: str, node: str) -> None:
    assert node_of(host, ["node1", "node10"]) == node


@pytest.mark.parametrize(
    ("nodes", "excluded", "expected"),
    [
        ("2", "(null)", (2, "")),
        ("1-1", "node[2,8]", (1, "node[2,8]")),
        ("3", "node4", (3, "node4")),
    ],
)
def test_how_many_nodes_a_job_has_or_asks_for_and_which_not(
    nodes: str, excluded: str, expected: tuple[int, str]
) -> None:
    fields = {"JobId": "7", "JobState": "PENDING", "NumNodes": nodes, "ExcNodeList": excluded}
    job = parse_job(fields)
    assert (job.nodes, job.excluded) == expected
