"""What the exit of a program that knows nothing of kempner means, and what follows, as tables."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import Any

import pytest

from kempner.config.sections import ProgramSection
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.history import RunHistory
from kempner.supervisor.policy.outcome import (
    STARTED,
    RankExit,
    decide_outcome,
    has_advanced,
    interpret,
)
from kempner.supervisor.policy.restart import (
    Failure,
    decide_restart,
    failures,
    requeues_without_progress,
)

NONE, LIMIT = StopReason.NONE, StopReason.TIME_LIMIT
DONE, STOPPED, CRASHED = ExitCode.COMPLETED, ExitCode.STOPPED, ExitCode.CRASHED
TERM, KILL, SEGV = -signal.SIGTERM, -signal.SIGKILL, -signal.SIGSEGV
BY_DEFAULT = ProgramSection()
CHOSEN = ProgramSection(done_codes=[0, 10], requeue_codes=[20], fail_codes=[30, 75])


@pytest.mark.parametrize(
    ("codes", "status", "alone", "when_asked", "when_complete"),
    [
        (BY_DEFAULT, 0, DONE, STOPPED, DONE),
        (BY_DEFAULT, 1, CRASHED, STOPPED, DONE),
        (BY_DEFAULT, 2, ExitCode.USAGE, STOPPED, DONE),
        (BY_DEFAULT, 65, ExitCode.BAD_DATA, STOPPED, DONE),
        (BY_DEFAULT, 75, STOPPED, STOPPED, DONE),
        (BY_DEFAULT, 76, CRASHED, STOPPED, DONE),  # it knows of no peers
        (BY_DEFAULT, 143, CRASHED, STOPPED, DONE),  # a shell whose child died of SIGTERM
        (BY_DEFAULT, 255, CRASHED, STOPPED, DONE),
        (BY_DEFAULT, TERM, CRASHED, STOPPED, DONE),
        (BY_DEFAULT, SEGV, CRASHED, STOPPED, DONE),
        (BY_DEFAULT, KILL, CRASHED, STOPPED, DONE),
        (BY_DEFAULT, None, CRASHED, STOPPED, CRASHED),
        (CHOSEN, 0, DONE, STOPPED, DONE),
        (CHOSEN, 10, DONE, DONE, DONE),
        (CHOSEN, 20, STOPPED, STOPPED, DONE),
        (CHOSEN, 30, CRASHED, CRASHED, CRASHED),
        (CHOSEN, 75, CRASHED, CRASHED, CRASHED),
        (ProgramSection(requeue_codes=[]), 75, CRASHED, STOPPED, DONE),
        (ProgramSection(done_codes=[], requeue_codes=[0]), 0, STOPPED, STOPPED, DONE),
        (ProgramSection(done_codes=[]), 0, CRASHED, STOPPED, DONE),
        (ProgramSection(fail_codes=[65]), 65, ExitCode.BAD_DATA, ExitCode.BAD_DATA,
         ExitCode.BAD_DATA),
    ],
)  # fmt: skip
def test_a_code_means_what_the_user_says_and_after_a_stop_the_run_goes_on(
    codes: ProgramSection,
    status: int | None,
    alone: ExitCode,
    when_asked: ExitCode,
    when_complete: ExitCode,
) -> None:
    end = RankExit(1, status)
    assert outcome(interpret(end, codes, complete=False)) is alone
    assert outcome(interpret(end, codes, complete=True)) is when_complete
    asked = interpret(replace(end, asked=True), codes, complete=False)
    for reason in (r for r in StopReason if r.ends_run):
        assert outcome(asked, reason) is when_asked
    said = interpret(replace(end, asked=True), codes, complete=True)
    if status is not None:
        assert outcome(said, LIMIT) is when_complete


def outcome(end: RankExit, stop: StopReason = NONE) -> ExitCode:
    """Of a run whose other rank was killed by the supervisor, or is done, too."""
    other = RankExit(0, 0, means=DONE) if end.code == DONE else RankExit(0, KILL, ended_by_us=True)
    return decide_outcome([end, other], stop).code


def test_who_was_killed_by_the_supervisor_has_said_nothing() -> None:
    killed = RankExit(0, KILL, ended_by_us=True, asked=True)
    assert interpret(killed, CHOSEN, complete=True) == killed


def test_one_of_two_ranks_that_is_done_does_not_complete_a_run_that_is_stopped() -> None:
    ends = [RankExit(0, 0), RankExit(1, 0, asked=True)]
    meant = [interpret(end, BY_DEFAULT, complete=False) for end in ends]
    assert decide_outcome(meant, LIMIT).code is STOPPED


def test_a_code_that_means_failure_ends_the_run_at_once() -> None:
    failure = Failure(0, None, "", False, CRASHED)
    for status, restart in ((30, False), (31, True)):
        end = interpret(RankExit(0, status), CHOSEN, complete=False)
        verdict = decide_restart(decide_outcome([end]), failure, [], 3)
        assert verdict.again is restart
        assert f"rank 0 exited with code {status}" in verdict.reason
        assert ("program.fail_codes" in verdict.reason) is not restart


LONG = 600.0


@pytest.mark.parametrize(
    ("step", "before", "seconds", "stopped", "advanced"),
    [
        (None, None, STARTED, True, True),
        (None, None, STARTED - 0.1, True, False),  # or it would be requeued for ever
        (None, None, LONG - 0.1, False, False),
        (None, None, LONG, False, True),
        (None, 50, STARTED, True, True),
        (0, None, 5000.0, True, False),
        (1, None, 1.0, False, True),
        (50, 50, 5000.0, True, False),
        (50, 50, 5000.0, False, False),
        (51, 50, 1.0, True, True),
        (49, 50, 5000.0, False, False),
    ],
)
def test_a_program_gets_on_by_its_step_or_if_that_is_unknown_by_time(
    step: int | None, before: int | None, seconds: float, stopped: bool, advanced: bool
) -> None:
    assert has_advanced(step, before, seconds, stopped, LONG) is advanced


REQUEUED = {"event": "requeued", "step": None, "job": "7", "preempted": False}
ADVANCED = {"event": "program_advanced", "step": None, "seconds": 3600.0}
FAILED = {"event": "attempt_failed", "step": 0, "committed": None, "raised": "", "code": 1}


@pytest.mark.parametrize(
    ("events", "requeues", "failed"),
    [
        ([REQUEUED] * 3, 3, 0),
        ([ADVANCED, REQUEUED] * 3, 1, 0),
        ([ADVANCED, REQUEUED] * 30 + [ADVANCED], 0, 0),
        ([ADVANCED, REQUEUED, REQUEUED], 2, 0),
        ([FAILED, FAILED], 0, 2),
        ([FAILED, ADVANCED, FAILED], 0, 1),
        ([FAILED, FAILED, ADVANCED], 0, 0),
    ],
)
def test_what_came_before_it_got_on_counts_no_more(
    events: list[dict[str, Any]], requeues: int, failed: int
) -> None:
    history = RunHistory(events)
    assert requeues_without_progress(history, "7", None) == requeues
    assert len(failures(history)) == failed
