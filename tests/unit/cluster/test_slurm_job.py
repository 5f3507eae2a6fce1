"""What Slurm says of a job, and what is happening to it: tables over answers of a real 22.05.

`slurm_data/environments.json` and `jobs.json` were recorded on the cluster of tests/slurm.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from kempner.cluster.slurm.hostlist import node_of
from kempner.cluster.slurm.job import (
    FINAL,
    QUEUED,
    JobEvent,
    classify,
    job_fields,
    job_id,
    node_fields,
    parse_job,
    restart_count,
    telling_state,
)
from kempner.cluster.slurm.resources import detect

DATA = Path(__file__).with_name("slurm_data")
SEEN: dict[str, dict[str, str]] = json.loads((DATA / "environments.json").read_text())
JOBS: dict[str, str] = json.loads((DATA / "jobs.json").read_text())


def test_a_job_is_read() -> None:
    job = parse_job(job_fields(JOBS["running"]))
    assert (job.id, job.state, job.reason, job.restarts) == ("1", "RUNNING", "", 0)
    assert job.nodes.held == "node[1-2]"
    assert job.may_requeue
    assert job.running
    assert job.times.limit == 3600
    assert job.times.end is not None
    assert job.times.preempt is None


def test_the_requeue_flag_and_the_id_of_an_array_element_are_read() -> None:
    assert not parse_job(job_fields(JOBS["no requeue"])).may_requeue
    assert parse_job(job_fields(JOBS["array element"])).id == "4"


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
    assert parse_job(job_fields(shown)).times.limit == seconds


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
        ("running", "running", False, JobEvent.NOTHING),
        ("running", "running", True, JobEvent.TIME_LIMIT),
        ("before the preemption", "preempted", False, JobEvent.PREEMPTION),
        ("before the preemption", "preempted", True, JobEvent.PREEMPTION),
        ("before the cancel", "cancelled", True, JobEvent.CANCEL),
        ("before the requeue", "requeued", True, JobEvent.REQUEUE),
        ("before the requeue", "waiting again", False, JobEvent.REQUEUE),
        ("before the limit", "limit reached", True, JobEvent.TIME_LIMIT_REACHED),
        ("before the limit", "timed out", False, JobEvent.TIME_LIMIT_REACHED),
    ],
)
def test_what_happens_is_told_from_two_looks(
    before: str, now: str, warned: bool, event: JobEvent
) -> None:
    assert (
        classify(parse_job(job_fields(JOBS[before])), parse_job(job_fields(JOBS[now])), warned)
        is event
    )


@pytest.mark.parametrize(
    ("state", "event"), [("COMPLETED", JobEvent.ENDED), ("CANCELLED", JobEvent.CANCEL)]
)
def test_a_job_that_is_over_is_not_to_be_requeued(state: str, event: JobEvent) -> None:
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
    assert now.times.preempt is not None
    assert before.times.end is not None
    assert now.times.end == now.times.preempt + 20 < before.times.end


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
    assert (job.nodes.count, job.nodes.excluded) == expected


GOES_ON = [
    "RUNNING", "SIGNALING", "STOPPED", "STAGE_OUT", "CONFIGURING", "RESIZING",
    "A_STATE_OF_THE_NEXT_VERSION",
]  # fmt: skip


@pytest.mark.parametrize("state", [*GOES_ON, "SUSPENDED"])
def test_a_state_that_is_not_known_to_be_an_end_is_none(state: str) -> None:
    before = parse_job(job_fields(JOBS["running"]))
    now = replace(before, state=state)
    assert classify(before, now) is JobEvent.NOTHING
    assert now.running is (state != "STAGE_OUT")


@pytest.mark.parametrize("state", sorted(FINAL | QUEUED))
def test_a_job_that_is_over_or_waits_does_not_run(state: str) -> None:
    before = parse_job(job_fields(JOBS["running"]))
    now = replace(before, state=state)
    assert not now.running
    assert (classify(before, now) is JobEvent.REQUEUE) is now.queued is (state in QUEUED)


@pytest.mark.parametrize(
    ("state", "reason", "held"),
    [
        ("PENDING", "Resources", False),
        ("RUNNING", "JobHeldUser", False),
        ("REQUEUE_HOLD", "", True),
        ("SPECIAL_EXIT", "", True),
        ("PENDING", "JobHeldUser", True),
        ("PENDING", "JobHeldAdmin", True),
        ("PENDING", "launch_failed_requeued_held", True),
        ("PENDING", "JobHoldMaxRequeue", True),
        ("PENDING", "launch_failure_limit_exceeded_requeued_held", True),
        ("PENDING", "user_env_retrieval_failed_requeued_held", True),
        ("PENDING", "job_requeued_in_held_state", True),
        ("PENDING", "job_requeued_in_special_exit_state", True),
        ("PENDING", "BadConstraints", True),
        ("PENDING", "BeginTime", False),
        ("RESV_DEL_HOLD", "", True),
    ],
)
def test_a_held_job_waits_for_its_release(state: str, reason: str, held: bool) -> None:
    assert replace(parse_job(job_fields(JOBS["running"])), state=state, reason=reason).held is held


BASES = ("PENDING", "RUNNING", "SUSPENDED", *sorted(FINAL))
FLAGS = {
    "22.05": (
        *("LAUNCH_FAILED", "UPDATE_DB", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESIZING"),
        *("CONFIGURING", "COMPLETING", "STOPPED", "RECONFIG_FAIL", "POWER_UP_NODE", "REVOKED"),
        *("REQUEUE_FED", "RESV_DEL_HOLD", "SIGNALING", "STAGE_OUT"),
    ),
}  # fmt: skip
FLAGS["24.11"] = FLAGS["22.05"]
FLAGS["26.05"] = (*FLAGS["24.11"], "EXPEDITING")
"""The flags of a job's state: slurm.h's JOB_*, as `job_state_string_complete` writes them."""

ENDS = (JobEvent.ENDED, JobEvent.CANCEL, JobEvent.TIME_LIMIT_REACHED)


def told_states() -> Iterator[str]:
    """All that a JobState of the three versions may be, and words of versions to come."""
    unknown = ("SOMETHING_NEW", "ANOTHER")
    for base in BASES:
        for version in FLAGS:
            flags = (*FLAGS[version], *unknown)
            yield from (base, *flags)
            for some in (*((flag,) for flag in flags), *combinations(flags, 2)):
                yield from (
                    joint.join(words) for joint in "+," for words in permutations_of(some, base)
                )


def permutations_of(flags: tuple[str, ...], base: str) -> Iterator[tuple[str, ...]]:
    yield (base, *flags)
    yield (*flags, base)


@pytest.mark.parametrize("warned", [False, True])
@pytest.mark.parametrize("reason", ["", "Prolog", "A_reason_to_come"])
def test_only_a_word_that_is_known_to_be_an_end_ends_a_job(warned: bool, reason: str) -> None:
    before = parse_job(job_fields(JOBS["running"]))
    seen = 0
    for told in set(told_states()):
        words = set(told.replace("+", ",").split(","))
        now = replace(before, state=telling_state(told), reason=reason)
        event = classify(before, now, warned)
        if event in ENDS:
            assert words & (FINAL | {"COMPLETING"}), told
        if event is JobEvent.REQUEUE or now.queued:
            assert words & QUEUED, told
        if not now.running:
            assert words & (FINAL | QUEUED | {"COMPLETING", "STAGE_OUT"}), told
        if not words & (FINAL | QUEUED | set(FLAGS["26.05"])):
            assert now.running, told
            assert event in (JobEvent.NOTHING, JobEvent.TIME_LIMIT), told
        if words == {told} and told in FINAL:
            assert event in ENDS, told
        seen += 1
    assert seen > 5000


@pytest.mark.parametrize("joint", ["+", ","])
@pytest.mark.parametrize(
    ("words", "state"),
    [
        *((f"{base}-{flag}", flag) for base in ("RUNNING", "PENDING") for flag in GOES_ON[1:-1]),
        *((f"{base}-COMPLETING", "COMPLETING") for base in sorted(FINAL)),
        *((f"{base}-NEW", base) for base in sorted(FINAL)),
        ("NEW-COMPLETED", "COMPLETED"),
        ("PENDING-REQUEUE_HOLD", "REQUEUE_HOLD"),
        ("PENDING-EXPEDITING", "EXPEDITING"),
        ("NEW", "NEW"),
        ("RUNNING", "RUNNING"),
    ],
)
def test_of_several_states_the_one_that_says_most_counts(
    words: str, state: str, joint: str
) -> None:
    assert telling_state(words.replace("-", joint)) == state
