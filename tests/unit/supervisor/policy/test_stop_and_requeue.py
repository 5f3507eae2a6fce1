"""When a job's ranks are told to stop, and what becomes of the job then, as tables."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from kempner.cluster.slurm.job import JobNodes, JobState, JobTimes
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.exit_codes import StopReason as R
from kempner.run.record.events import CorruptionFound
from kempner.run.record.history import RunHistory
from kempner.run.record.save_times import Durations, SaveSeconds
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import (
    MAX_REQUEUES_WITHOUT_PROGRESS as MAX,
)
from kempner.supervisor.policy.restart import (
    decide_requeue,
    killed_starts,
    requeues_without_progress,
)
from kempner.supervisor.policy.stop import (
    StandingStop,
    StopOrder,
    decide_stop,
    exit_margin,
    renew,
    stop_lead,
    time_to_abandon,
    warn_of_slow_saves,
)

RUNNING = JobState(
    id="7",
    state="RUNNING",
    reason="",
    restarts=1,
    may_requeue=True,
    batch=True,
    times=JobTimes(end=3600.0, limit=3600.0),
    nodes=JobNodes("node[1-2]", count=2),
)


def job(**changes: Any) -> JobState:
    return replace(RUNNING, **changes)


PREEMPTED = job(times=replace(RUNNING.times, preempt=100.0))
TAKEN = "preempted by a job of higher priority"
PUT_BACK = "it was put back into the queue, by an operator, a preemption or a lost node"
COMPLETING = job(state="COMPLETING")


@pytest.mark.parametrize(
    ("now", "left", "warned", "advice"),
    [
        (RUNNING, 60.1, False, None),
        (RUNNING, 60.0, False, StopOrder(R.DEADLINE, "60 s are left of the job's time", 48.0)),
        (RUNNING, -5.0, False, StopOrder(R.DEADLINE, "-5 s are left of the job's time", 0.0)),
        (RUNNING, None, False, None),
        (RUNNING, 119.0, True, StopOrder(R.TIME_LIMIT, "Slurm sent a warning", 107.0)),
        (RUNNING, 11.0, True, StopOrder(R.TIME_LIMIT, "Slurm sent a warning", 0.0)),
        (RUNNING, -5.0, True, StopOrder(R.TIME_LIMIT, "Slurm sent a warning", 0.0)),
        (RUNNING, None, True, None),
        (RUNNING, 3600.0, True, StopOrder(R.TIME_LIMIT, "Slurm sent a warning", 3588.0)),
        (RUNNING, 5400.0, True,
         StopOrder(R.OPERATOR, "a signal came 1.5 h before the end of the job's time", 5388.0)),
        (replace(PREEMPTED, state="COMPLETING"), 3.0, True,
         StopOrder(R.PREEMPTION, "it was cancelled", 30.0)),
        (job(state="NODE_FAIL", reason="NodeDown"), 0.0, False,
         StopOrder(R.SIGNAL, "it is over", 30.0)),
        (PREEMPTED, 20.0, False, StopOrder(R.PREEMPTION, TAKEN, 50.0)),
        (PREEMPTED, 20.0, True, StopOrder(R.PREEMPTION, TAKEN, 50.0)),
        (PREEMPTED, -3.0, False, StopOrder(R.PREEMPTION, TAKEN, 30.0)),
        (PREEMPTED, None, False, StopOrder(R.PREEMPTION, TAKEN, 30.0)),
        (replace(PREEMPTED, state="SIGNALING"), 20.0, False,
         StopOrder(R.PREEMPTION, TAKEN, 50.0)),
        (COMPLETING, 0.0, True, StopOrder(R.CANCEL, "it was cancelled", 30.0)),
        (COMPLETING, 0.0, False, StopOrder(R.CANCEL, "it was cancelled", 30.0)),
        (job(state="CANCELLED"), 0.0, False, StopOrder(R.CANCEL, "it was cancelled", 30.0)),
        (job(state="COMPLETING", reason="TimeLimit"), 0.0, False,
         StopOrder(R.TIME_LIMIT, "its time is over", 30.0)),
        (job(state="COMPLETING", restarts=2), 3000.0, True,
         StopOrder(R.REQUEUE, PUT_BACK,
                30.0)),
        (job(state="SUSPENDED"), 3000.0, False, None),
        (job(state="SUSPENDED"), 3000.0, True, None),
    ],
)  # fmt: skip
def test_a_stop_is_advised_with_the_time_that_is_left(
    now: JobState, left: float | None, warned: bool, advice: StopOrder | None
) -> None:
    found = decide_stop(RUNNING, now, 30.0, left, lead=60.0, margin=12.0, warned=warned)
    assert found == advice


def standing(reason: R, by: float) -> StandingStop:
    return StandingStop(reason, reason.words, by)


@pytest.mark.parametrize(
    ("known", "reason", "left", "told"),
    [
        (None, R.SIGNAL, 60.0, standing(R.SIGNAL, 160.0)),
        (standing(R.SIGNAL, 160.0), R.SIGNAL, 60.0, None),
        (standing(R.SIGNAL, 160.0), R.SIGNAL, 59.5, None),
        (standing(R.SIGNAL, 160.0), R.SIGNAL, 59.0, standing(R.SIGNAL, 159.0)),
        (standing(R.SIGNAL, 160.0), R.TIME_LIMIT, 119.0, standing(R.TIME_LIMIT, 160.0)),
        (standing(R.SIGNAL, 160.0), R.TIME_LIMIT, 20.0, standing(R.TIME_LIMIT, 120.0)),
        (standing(R.CANCEL, 160.0), R.SIGNAL, 60.0, None),
        (standing(R.CANCEL, 160.0), R.DEADLINE, 20.0, standing(R.CANCEL, 120.0)),
        (standing(R.TIME_LIMIT, 160.0), R.PREEMPTION, 90.0, standing(R.PREEMPTION, 160.0)),
    ],
)
def test_ranks_are_told_again_when_less_time_is_left_or_the_reason_says_more(
    known: StandingStop | None, reason: R, left: float, told: StandingStop | None
) -> None:
    assert renew(known, StopOrder(reason, reason.words, left), now=100.0) == told


def saves(*seconds: float) -> Durations:
    return Durations(tuple(SaveSeconds(0.0, taken, 0.0) for taken in seconds))


@pytest.mark.parametrize(
    ("durations", "gap", "limit", "lead"),
    [
        (saves(), None, None, 120.0),
        (saves(), None, 86_400.0, 120.0),
        (saves(), None, 480.0, 120.0),
        (saves(), None, 120.0, 30.0),
        (saves(40.0), None, 86_400.0, 120.0),
        (saves(), 3.0, 86_400.0, 120.0),
        (saves(40.0), 3.0, 86_400.0, 2 * 3 + 2 * 40 + 10 + 12),
        (saves(40.0), 3.0, 300.0, 2 * 3 + 2 * 40 + 10 + 12),
        (saves(40.0), 3.0, 120.0, 60.0),
        (saves(800.0), 3.0, 900.0, 450.0),
        (saves(40.0), 3.0, None, 2 * 3 + 2 * 40 + 10 + 12),
        (saves(*[1.0] * 19, 90.0), 3.0, None, 2 * 3 + 2 * 1 + 10 + 12),
        (saves(*[1.0] * 18, 90.0, 90.0), 3.0, None, 2 * 3 + 2 * 90 + 10 + 12),
    ],
)
def test_the_lead_is_what_a_stop_takes_or_a_share_of_a_short_job(
    durations: Durations, gap: float | None, limit: float | None, lead: float
) -> None:
    assert stop_lead(durations, gap, limit, margin=12.0) == lead


@pytest.mark.parametrize(
    ("save", "preemption", "limit", "said"),
    [
        (None, 30.0, 600.0, None),
        (29.0, 30.0, None, None),
        (31.0, 30.0, None, "a save takes up to 31 s, and a preemption leaves 30 s"),
        (31.0, None, 86_400.0, None),
        (149.0, None, 600.0, None),
        (151.0, 600.0, 600.0, "two saves of up to 151 s, and half of the job's time is 300 s"),
    ],
)
def test_a_run_is_warned_of_saves_that_its_job_leaves_no_time_for(
    save: float | None, preemption: float | None, limit: float | None, said: str | None
) -> None:
    durations = Durations() if save is None else Durations((SaveSeconds(0.0, save, 0.0),))
    lead = stop_lead(durations, 0.5, limit, margin=15.0)
    found = warn_of_slow_saves(durations, preemption, lead, limit)
    assert found == said if said is None else said in str(found)


@pytest.mark.parametrize(
    ("measured", "limit", "margin"),
    [
        ([], None, 15.0),
        ([], 86_400.0, 15.0),
        ([], 120.0, 12.0),
        ([2.0, 3.0], 86_400.0, 15.0),
        ([2.0, 40.0], 86_400.0, 80.0),
        ([2.0, 40.0], 300.0, 30.0),
    ],
)
def test_the_margin_is_what_an_exit_took_and_never_much_of_a_short_job(
    measured: list[float], limit: float | None, margin: float
) -> None:
    assert exit_margin(measured, limit) == margin


def test_whoever_cannot_be_killed_leaves_time_for_the_requeue() -> None:
    assert time_to_abandon(None, 15.0) == 15.0
    assert time_to_abandon(600.0, 15.0) == 15.0
    assert time_to_abandon(14.0, 15.0) == 7.0
    assert time_to_abandon(-3.0, 15.0) == 2.0


STOPPED = Decision(ExitCode.STOPPED, "stopped on request")
COMPLETED = Decision(ExitCode.COMPLETED, "completed")
CRASHED = Decision(ExitCode.CRASHED, "rank 3 was killed by SIGSEGV", 3)


@pytest.mark.parametrize(
    ("decision", "now", "batch", "fruitless", "requeue", "words"),
    [
        (STOPPED, RUNNING, True, 0, True, "requeueing the job"),
        (STOPPED, PREEMPTED, True, 0, True, "higher priority: requeueing the job"),
        (STOPPED, job(state="SIGNALING"), True, 0, True, "requeueing the job"),
        (STOPPED, RUNNING, True, MAX - 1, True, "requeueing the job"),
        (STOPPED, RUNNING, True, MAX, False, "came back 3 times without a new step"),
        (STOPPED, PREEMPTED, True, MAX, True, "preempted by"),
        (STOPPED, RUNNING, False, 0, False, "this is an interactive allocation"),
        (STOPPED, job(restarts=2), True, 0, False, "was started again in the meantime"),
        (STOPPED, None, True, 0, False, "Slurm does not respond: submit the same command again"),
        (STOPPED, job(may_requeue=False), True, 0, False, "submitted with --no-requeue"),
        (STOPPED, COMPLETING, True, 0, False, "was cancelled: submit it again"),
        (STOPPED, job(state="CANCELLED"), True, 0, False, "was cancelled: submit it again"),
        (STOPPED, job(state="COMPLETING", restarts=2), True, 0, False, "Slurm requeues the job"),
        (STOPPED, job(state="COMPLETING", restarts=2, may_requeue=False), True, 0, False,
         "Slurm requeues the job"),
        (STOPPED, job(state="COMPLETING", reason="TimeLimit"), True, 0, True, "requeueing the job"),
        (STOPPED, job(state="TIMEOUT", reason="TimeLimit"), True, 0, False, "time is over"),
        (STOPPED, job(state="COMPLETING", reason="NodeDown"), True, 0, False,
         "the job is COMPLETING: if Slurm does not requeue it"),
        (STOPPED, job(state="FAILED"), True, 0, False, "the job is FAILED"),
        (STOPPED, job(state="SUSPENDED"), True, 0, True, "requeueing the job"),
        (STOPPED, job(state="A_STATE_TO_COME"), True, 0, True, "requeueing the job"),
        (STOPPED, job(state="PENDING", reason="launch_failed_requeued_held"), True, 0, False,
         "Slurm holds the job: launch_failed_requeued_held: Slurm does not start it again until it "
         "is released; a node could not start it: look at Slurm's Prolog there, then `scontrol "
         "release 7`"),
        (STOPPED, job(state="PENDING", reason="JobHoldMaxRequeue"), True, 0, False,
         "max_batch_requeue"),
        (STOPPED, job(state="PENDING", reason="JobHeldAdmin"), True, 0, False,
         "an administrator holds it: ask for `scontrol release 7`"),
        (STOPPED, job(state="REQUEUE_HOLD"), True, 0, False, "`scontrol release 7` lets it go"),
        (COMPLETED, RUNNING, True, 0, False, "completed"),
        (CRASHED, RUNNING, True, 0, False, "rank 3 was killed by SIGSEGV"),
        (CRASHED, None, False, MAX, False, "rank 3 was killed by SIGSEGV"),
    ],
)  # fmt: skip
def test_only_a_job_that_runs_and_may_and_gets_on_is_put_back(
    decision: Decision,
    now: JobState | None,
    batch: bool,
    fruitless: int,
    requeue: bool,
    words: str,
) -> None:
    parting = decide_requeue(decision, RUNNING, now, batch, fruitless)
    assert parting.requeue is requeue
    assert words in parting.reason


@pytest.mark.parametrize(
    ("scarce", "words"),
    [
        (False, "requeueing the job without node2, node3; it continues from its checkpoint"),
        (True, "to wait for node2, node3 because there are too few other nodes; it continues"),
    ],
)
def test_a_job_does_without_bad_nodes_where_there_are_others(scarce: bool, words: str) -> None:
    lost = Decision(ExitCode.CRASHED, "no answer", 3, bad_nodes=("node2", "node3"))
    parting = decide_requeue(lost, RUNNING, RUNNING, True, 0, scarce)
    assert parting.requeue
    assert words in parting.reason


def test_a_job_that_was_never_seen_before_is_judged_by_itself() -> None:
    assert decide_requeue(STOPPED, None, RUNNING, True, 0).requeue
    told = decide_requeue(STOPPED, None, COMPLETING, True, 0).reason
    assert told == "the job is COMPLETING: if Slurm does not requeue it, submit it again"
    cancelled = decide_requeue(STOPPED, None, job(state="CANCELLED"), True, 0).reason
    assert cancelled == "the job was cancelled: submit it again to continue"


def requeued(step: int | None, of: str = "7", preempted: bool = False) -> dict[str, Any]:
    return {"event": "requeued", "step": step, "job": of, "preempted": preempted}


def resubmitted(step: int | None, job: str, as_job: str) -> list[dict[str, Any]]:
    refused = {"event": "not_requeued", "step": step, "reason": "refused"}
    return [refused, {"event": "resubmitted", "job": job, "as_job": as_job}]


@pytest.mark.parametrize(
    ("events", "step", "count"),
    [
        ([], None, 0),
        ([], 7, 0),
        ([requeued(None)], None, 1),
        ([requeued(None)], 7, 0),
        ([requeued(7)], None, 0),
        ([requeued(7), requeued(7)], 7, 2),
        ([requeued(7), requeued(8)], 7, 0),
        ([requeued(7), requeued(8), requeued(8)], 8, 2),
        ([requeued(7), {"event": "checkpoint_committed", "step": 8}, requeued(7)], 7, 2),
        ([requeued(7, of="6"), requeued(7)], 7, 1),
        ([requeued(7, of="6")] * MAX, 7, 0),
        ([requeued(7), requeued(7, preempted=True), requeued(7)], 7, 2),
        ([requeued(7), {**requeued(7), "starting": True}, requeued(7)], 7, 2),
        # submitted again by its supervisor, with a new id each time
        (resubmitted(7, "5", "6") + resubmitted(7, "6", "7"), 7, 2),
        (resubmitted(7, "5", "6") + resubmitted(8, "6", "7"), 8, 1),
        ([requeued(7, of="6"), *resubmitted(7, "6", "7"), requeued(7)], 7, 3),
        (resubmitted(7, "3", "4") + resubmitted(7, "6", "7"), 7, 1),
        ([{"event": "not_requeued", "step": 7, "reason": "x"}, requeued(7)], 7, 1),
    ],
)
def test_requeues_without_a_new_step_are_counted(
    events: list[dict[str, Any]], step: int | None, count: int
) -> None:
    assert requeues_without_progress(RunHistory(events), "7", step) == count


KILLED_START = {**requeued(None), "starting": True}
STARTED = {"event": "attempt_started", "ranks": 2}


@pytest.mark.parametrize(
    ("events", "count"),
    [
        ([], 0),
        ([KILLED_START] * 3, 3),
        ([STARTED, requeued(None), KILLED_START, KILLED_START], 2),
        ([KILLED_START, STARTED, requeued(None)], 0),
        ([KILLED_START, STARTED, KILLED_START], 1),
        ([KILLED_START, {**KILLED_START, "job": "6"}, KILLED_START], 1),
    ],
)
def test_starts_that_were_killed_are_counted(events: list[dict[str, Any]], count: int) -> None:
    assert killed_starts(RunHistory(events), "7") == count


def committed(step: int) -> dict[str, Any]:
    return {"event": "checkpoint_committed", "step": step}


def resumed(step: int) -> dict[str, Any]:
    return {"event": "resumed", "step": step}


def corrupted(to: int | None) -> dict[str, Any]:
    found = CorruptionFound(110, "update", (1,), ("n1",), sure=True, to=to, reason="it lies")
    return {"event": found.name, **found.to_fields()}


@pytest.mark.parametrize(
    ("events", "step"),
    [
        ([], None),
        ([{"event": "stopped", "step": 5}], None),
        ([committed(10), committed(20), {"event": "stopped", "step": 25}], 20),
        ([committed(100), committed(60)], 60),  # after a fallback to an earlier one
        ([committed(10), resumed(20)], 20),  # the rank that committed it died before it said so
        ([resumed(20)], 20),
        ([committed(100), resumed(60)], 100),  # to go back is no commit
        ([committed(60), committed(100), corrupted(60)], 60),  # of later ones none knows
        ([committed(60), corrupted(None)], None),
        ([committed(60), corrupted(None), committed(20)], 20),
    ],
)
def test_the_newest_commit_is_the_last_that_was_made(
    events: list[dict[str, Any]], step: int | None
) -> None:
    assert RunHistory(events).last_step == step
