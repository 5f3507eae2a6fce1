"""What a run is doing is a function of its facts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kempner.insight.run_reader import LiveState, Metrics, RankPlace, RunFacts
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import NO_ANSWER, JobStatus
from kempner.insight.status.summary import Status, summarise
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.gave_up import GaveUp
from kempner.run.record.history import RunHistory

NOW = 1000.0


def event(name: str, at: float, attempt: int = 1, **fields: Any) -> dict[str, Any]:
    return {"event": name, "time": at, "attempt": attempt, **fields}


STARTED = event("attempt_started", 900.0, ranks=2)
OWN = STARTED | {"own_program": True}
READY = event("ready_to_train", 910.0, step=0, device="cpu", reached={})
AGAIN = event("attempt_started", 960.0, 2, ranks=2, job="7")
EARLIER = event("attempt_started", 850.0, 2, ranks=2)
ASKED = event("stop_requested", 980.0, reason="time_limit", sentence="Slurm sent a warning")
ASKED |= {"seconds_left": 50.0}
STOPPED = event("stopped", 985.0, step=7, reason="time_limit", lost_steps=0)
REQUEUED = event("requeued", 987.0, step=7, job="7")
HANG = event("hang", 980.0, reason="rank 1 is silent", laggard=1, waiting={}, processes=[])


def ended(code: int, reason: str, at: float = 986.0, attempt: int = 1) -> dict[str, Any]:
    return event("attempt_ended", at, attempt, code=code, reason=reason, culprit=None, exits={})


GREW = {**STOPPED, "reason": "grow"}
KILLED = ended(1, "rank 1 was killed by SIGKILL")
LEFT = ended(75, "stopped (time limit); start again to continue")


def status(*lines: dict[str, Any], now: float = NOW, **facts: Any) -> Status:
    live = {name: facts.pop(name) for name in ("alive", "attempt", "ranks") if name in facts}
    metrics = Metrics(facts.pop("metrics", ()), facts.pop("total_steps", None))
    return summarise(RunFacts(now, RunHistory(lines), LiveState(**live), metrics, **facts))


def ranks(*phases: str) -> tuple[RankPlace, ...]:
    return tuple(RankPlace(number, 7, phase) for number, phase in enumerate(phases))


def job(state: str, **fields: Any) -> JobStatus:
    return JobStatus("7", state, **fields)


GAVE_UP = GaveUp(ExitCode.CRASHED, "the same twice")
A = Activity


@pytest.mark.parametrize(
    ("lines", "facts", "activity", "reason"),
    [
        ([], {}, A.NOT_STARTED, ""),
        ([], {"job": job("PENDING", reason="Priority")}, A.QUEUED, "Priority: other jobs"),
        ([], {"job": job("RUNNING")}, A.STARTING, "its job runs, and the supervisor begins"),
        ([], {"alive": True}, A.HEALTH_CHECK, ""),
        ([STARTED, READY, KILLED], {"alive": True, "attempt": 2}, A.HEALTH_CHECK, "attempt 2"),
        ([STARTED], {"alive": True}, A.STARTING, "launched"),
        ([STARTED], {"alive": True, "ranks": ranks("start")}, A.STARTING, "1 of 2 ranks"),
        ([OWN], {"alive": True}, A.RUNNING, "not reported a step yet"),
        ([OWN], {"alive": True, "ranks": ranks("start")}, A.STARTING, "1 of 2 ranks"),
        ([OWN], {"alive": True, "ranks": ranks("step")}, A.TRAINING, ""),
        ([STARTED], {"alive": True, "ranks": ranks("start", "load")}, A.STARTING, "rank 0 import"),
        ([STARTED], {"alive": True, "ranks": ranks("load", "compile")}, A.LOADING, "rank 0"),
        ([STARTED], {"alive": True, "ranks": ranks("compile", "compile")}, A.STARTING, "all ranks"),
        ([STARTED, READY], {"alive": True, "ranks": ranks("step", "step")}, A.TRAINING, ""),
        ([STARTED, READY], {"alive": True, "ranks": ranks("step", "save")}, A.SAVING, "rank 1"),
        ([STARTED, READY], {"alive": True, "ranks": ranks("eval", "eval")}, A.EVALUATING, "all"),
        ([STARTED, READY], {"alive": True, "ranks": ranks("exit", "exit")}, A.STOPPING, "leave"),
        ([STARTED, READY, ASKED], {"alive": True}, A.STOPPING, "time limit: Slurm sent a warning"),
        ([STARTED, READY, HANG], {"alive": True}, A.STOPPING, "rank 1 is silent"),
        ([STARTED, READY, KILLED], {"alive": True}, A.RESTARTING, "rank 1 was killed by SIGKILL"),
        ([STARTED, READY, KILLED], {"alive": False}, A.FAILED, "rank 1 was killed by SIGKILL"),
        ([STARTED, READY, KILLED, AGAIN], {"alive": True}, A.STARTING, "launched"),
        ([STARTED, READY, STOPPED, LEFT], {"alive": False}, A.STOPPED, "time limit"),
        ([STARTED, READY, STOPPED, LEFT], {"alive": True}, A.STOPPING, "every rank has left"),
        ([STARTED, READY, GREW, LEFT], {"alive": True}, A.RESTARTING, "grow"),
        ([STARTED, READY, STOPPED, LEFT], {}, A.STOPPED, "time limit"),
        ([STARTED, READY, STOPPED], {"alive": False}, A.STOPPED, "time limit"),
        ([STARTED, READY, STOPPED, LEFT, REQUEUED], {"alive": False}, A.QUEUED, "into the queue"),
        (
            [STARTED, READY, STOPPED, LEFT, REQUEUED],
            {"alive": False, "job": job(NO_ANSWER)},
            A.QUEUED,
            "into the queue",
        ),
        (
            [STARTED, READY, KILLED, REQUEUED],
            {"alive": False, "job": job("COMPLETING")},
            A.QUEUED,
            "into the queue",
        ),
        (
            [STARTED, READY, STOPPED, LEFT, REQUEUED],
            {"alive": False, "job": job("PENDING", reason="BeginTime")},
            A.QUEUED,
            "BeginTime",
        ),
        (
            [STARTED, READY, STOPPED, LEFT, REQUEUED],
            {"alive": False, "job": job("RUNNING")},
            A.STARTING,
            "its job runs again",
        ),
        (
            [STARTED, READY, STOPPED, LEFT, REQUEUED],
            {"alive": False, "job": job("CANCELLED")},
            A.STOPPED,
            "time limit",
        ),
        ([STARTED, READY], {"alive": False}, A.DEAD, ""),
        ([STARTED, READY, ASKED], {"alive": False}, A.DEAD, "asked to stop (time limit) before"),
        ([STARTED, READY, KILLED], {"alive": False, "attempt": 2}, A.DEAD, "before attempt 2"),
        ([STARTED, READY], {}, A.UNKNOWN, ""),
        ([STARTED, READY], {"alive": False, "job": job("RUNNING")}, A.UNKNOWN, "its job runs, and"),
        ([STARTED, READY], {"alive": False, "job": job("FAILED")}, A.DEAD, ""),
        # The clock was set back between two attempts: the last one has the highest number.
        ([STARTED, READY, KILLED, EARLIER], {"alive": False, "attempt": 2}, A.DEAD, ""),
        ([STARTED, READY, event("completed", 990.0, step=9)], {"alive": True}, A.DONE, ""),
        (
            [STARTED, READY, KILLED],
            {"gave_up": GaveUp(ExitCode.CRASHED, "twice")},
            A.GIVEN_UP,
            "tw",
        ),
    ],
)
def test_the_activity_and_its_reason(
    lines: list[dict[str, Any]], facts: dict[str, Any], activity: Activity, reason: str
) -> None:
    found = status(*lines, **facts).doing
    assert found.activity is activity
    assert reason in found.reason
    assert bool(found.reason) is bool(reason)


def test_a_program_that_never_reports_is_not_starting_for_ever() -> None:
    found = status(STARTED, now=NOW + 200, alive=True)
    assert found.doing.activity is Activity.RUNNING


def test_storage_that_is_waited_for_is_named_with_its_ranks() -> None:
    there = [
        replace(p, storage="/x: Stale file handle") if p.rank else p for p in ranks("step", "save")
    ]
    found = status(STARTED, READY, alive=True, ranks=there)
    assert found.state == "waiting for storage (rank 1)"
    assert found.ranks.waits_for == "/x: Stale file handle"


def step(number: int, at: float) -> dict[str, Any]:
    return {"step": number, "loss": 2.0, "tokens": 100 * number, "time": at, "attempt": 1}


def test_a_run_that_stands_still_says_since_when_and_for_whom() -> None:
    metrics = [step(n, 900.0 + n) for n in range(20, 60)]
    there = [RankPlace(0, 59, "step", waiting="vote"), RankPlace(1, 58, "step")]
    facts = {"alive": True, "metrics": metrics, "ranks": there, "total_steps": 90}
    found = status(STARTED, READY, **facts)
    assert found.outlook.done_at is None
    assert found.doing.reason == "no step for 41 s, usually one every 1 s"
    assert found.ranks.waits_for == "1 of 2 ranks wait in vote for rank 1 (step 58, step)"
    moving = status(STARTED, READY, now=965.0, **facts)
    assert moving.outlook.done_at == 990.0
    assert (moving.doing.reason, moving.ranks.waits_for) == ("", "")


def test_a_save_that_holds_the_run_up_for_long_waits_for_storage() -> None:
    metrics = [step(n, 900.0 + n) for n in range(20, 60)]
    took = {"stage_seconds": 0.1, "write_seconds": 0.2, "commit_seconds": 0.1}
    saved = [{"event": "checkpoint_committed", "step": n, **took} for n in (20, 40)]
    facts = {"alive": True, "metrics": metrics, "ranks": ranks("save", "save"), "total_steps": 90}
    found = status(STARTED, READY, *saved, **facts)
    assert found.state == "saving (all ranks: no step for 41 s, usually one every 1 s)"
    assert found.ranks.waits_for == (
        "storage: the files of a checkpoint are still being written; a save usually takes 0.4 s"
    )
    assert found.outlook.done_at is None
    moving = status(STARTED, READY, *saved, now=965.0, **facts)
    assert (moving.state, moving.ranks.waits_for) == ("saving (all ranks)", "")
    assert moving.outlook.done_at == 990.0


def test_the_end_of_the_run_is_set_against_the_end_of_the_job() -> None:
    metrics = [step(n, 940.0 + n) for n in range(40, 61)]
    for ends_at, fits in ((1039.0, False), (1041.0, True)):
        running = job("RUNNING", ends_at=ends_at)
        facts = {"alive": True, "metrics": metrics, "total_steps": 100, "job": running}
        found = status(STARTED, READY, ranks=ranks("step", "step"), **facts)
        assert (found.outlook.done_at, found.outlook.fits) == (1040.0, fits)
        assert found.outlook.deadline is not None
        assert found.outlook.deadline.time == ends_at


def test_the_nearest_deadline_counts() -> None:
    ends = job("RUNNING", ends_at=1100.0)
    asked = status(STARTED, READY, ASKED, alive=True, job=ends).outlook.deadline
    assert asked is not None
    assert (asked.time, "killed" in asked.what) == (1030.0, True)
    taken = status(STARTED, READY, alive=True, job=replace(ends, preempted=True)).outlook.deadline
    assert taken is not None
    assert taken.what == "the preemption takes the nodes"


def test_interruptions_tell_when_where_and_why() -> None:
    failed = event("attempt_failed", 951.0, step=8, committed=5, raised="", node="node2")
    killed = {**KILLED, "culprit": 1, "time": 950.0}
    lines = [STARTED, READY, killed, failed, AGAIN]
    (end,) = status(*lines, alive=True).ends
    assert (end.attempt, end.time, end.kind) == (1, 950.0, "failure")
    assert (end.cause, end.rank, end.node) == ("rank 1 was killed by SIGKILL", 1, "node2")
    (end, stopped) = status(
        *lines,
        {**STOPPED, "attempt": 2},
        ended(75, "stopped", 990.0, 2),
        alive=False,
    ).ends
    assert (stopped.attempt, stopped.cause, stopped.rank) == (2, "stopped: time limit", None)


@pytest.mark.parametrize(
    ("worked", "named"),
    [
        ((100.0, 90.0, 90.0), 0),
        ((92.0, 90.0, 90.0), None),
        ((1.0, 0.1, 0.1), None),  # too early to say
    ],
)
def test_the_slowest_rank_is_named_if_one_stands_out(
    worked: tuple[float, ...], named: int | None
) -> None:
    there = [RankPlace(n, 7, "step", w, 110.0 - w) for n, w in enumerate(worked)]
    slow = status(STARTED, READY, alive=True, ranks=there).ranks.slowest
    assert (None if slow is None else slow.rank) == named


def test_what_the_supervisor_says_of_a_straggler_goes_first() -> None:
    told = {"worked": 2.0, "usual": 1.0, "lost": 0.5, "reason": "rank 1 on node2 is slow"}
    named = event("straggler", 950.0, rank=1, node="node2", **told)
    slow = status(STARTED, READY, named, alive=True).ranks.slowest
    assert slow is not None
    assert (slow.rank, slow.node) == (1, "node2")
    over = event("recovered", 960.0, of="straggler")
    assert status(STARTED, READY, named, over, alive=True).ranks.slowest is None
