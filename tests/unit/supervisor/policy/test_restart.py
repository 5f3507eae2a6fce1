"""When to start again: the policy as a table."""

from __future__ import annotations

import pytest

from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.history import RunHistory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import (
    Failure,
    blame_environment,
    decide_restart,
    failures,
    prevents_restart,
)

CRASH = Decision(ExitCode.CRASHED, "rank 1 failed", 1)


@pytest.mark.parametrize(
    ("code", "again"),
    [
        (ExitCode.CRASHED, True),
        (ExitCode.PEERS_LOST, True),
        (ExitCode.HUNG, True),
        (ExitCode.USAGE, False),
        (ExitCode.BAD_DATA, False),
        (ExitCode.CHECKPOINT_FAILED, False),
        (ExitCode.DIVERGED, False),
        (ExitCode.INTERRUPTED, False),
    ],
)
def test_only_what_a_restart_may_mend_is_started_again(code: ExitCode, again: bool) -> None:
    assert decide_restart(Decision(code, "so"), Failure(7, 5), [], 3).again is again


@pytest.mark.parametrize(
    ("failure", "earlier", "again", "words"),
    [
        (Failure(0, None), [], True, "before the first step; restarting from the beginning"),
        (Failure(7, 5), [], True, "at step 7; restarting from step 5"),
        (Failure(7, 5), [Failure(6, 5)], True, "restarting"),
        (Failure(7, 5), [Failure(6, 5), Failure(8, 5)], False, "3 attempts saved nothing new"),
        (Failure(7, 5), [Failure(6, 4), Failure(8, 4), Failure(9, 4)], True, "from step 5"),
        (Failure(7, 5), [Failure(8, 5), Failure(3, 2), Failure(8, 5)], True, "from step 5"),
        (Failure(7, 5, "KeyError"), [Failure(7, 5, "KeyError")], False, "fails at step 7 every"),
        (Failure(7, 5, "KeyError"), [Failure(6, 5, "KeyError")], True, "restarting"),
        (Failure(7, 5, "KeyError"), [Failure(7, 5, "OSError")], True, "restarting"),
        (Failure(7, 5), [Failure(7, 5)], True, "restarting"),  # killed twice: by whom?
        (Failure(0, None, "E"), [Failure(0, None, "E")], False, "before the first step every time"),
        (Failure(0, None, unstarted=1), [], True, "restarting"),
        (Failure(0, None, unstarted=1), [Failure(0, None, unstarted=1)], False, "every time"),
        (Failure(0, None, unstarted=1), [Failure(0, None, unstarted=2)], True, "restarting"),
        (Failure(0, None), [Failure(0, None, unstarted=1)], True, "restarting"),
        (Failure(0, None, unstarted=1), [Failure(0, None, "no expert", unstarted=1)], True, "rest"),
        (Failure(0, 5, unstarted=1), [Failure(0, 4, unstarted=1)], True, "from step 5"),
        (Failure(7, 5), [Failure(7, 5, node_lost=True)] * 3, True, "restarting"),
        (Failure(7, 5, node_lost=True), [Failure(7, 5)] * 3, True, "restarting"),
        (Failure(7, 5, node_lost=True), [Failure(7, 5, node_lost=True), Failure(7, 5)] * 2, False,
         "3 attempts saved nothing new"),
    ],
)  # fmt: skip
def test_progress_is_what_counts(
    failure: Failure, earlier: list[Failure], again: bool, words: str
) -> None:
    verdict = decide_restart(CRASH, failure, earlier, budget=2)
    assert verdict.again is again
    assert words in verdict.reason
    assert CRASH.reason in verdict.reason


def test_what_has_worked_before_is_never_misconfigured() -> None:
    apart = Decision(ExitCode.USAGE, "the nodes would not all use the same network", 0)
    assert blame_environment(apart, worked=False) == apart
    found = blame_environment(apart, worked=True)
    assert (found.code, found.environment) == (ExitCode.CRASHED, True)
    assert decide_restart(found, Failure(7, 5, node_lost=True), [], 3).again
    assert blame_environment(CRASH, worked=True) == CRASH


def test_the_last_start_is_said_to_be_the_last() -> None:
    told = [decide_restart(CRASH, Failure(7, 5), [Failure(6, 5)] * n, budget=3) for n in range(4)]
    assert [(verdict.again, verdict.last) for verdict in told] == [
        (True, False),
        (True, False),
        (True, True),
        (False, False),
    ]


def test_only_what_may_be_back_soon_is_waited_for() -> None:
    lost = Failure(7, 5, node_lost=True)
    pauses = [decide_restart(CRASH, lost, [lost] * n, budget=9).pause for n in range(4)]
    assert pauses == [0.0, 20.0, 60.0, 60.0]
    assert decide_restart(CRASH, Failure(7, 5), [Failure(6, 5)] * 3, budget=9).pause == 0.0


def test_without_a_budget_nothing_is_started_again() -> None:
    assert not decide_restart(CRASH, Failure(7, 5), [], 0).again


def test_a_person_who_starts_anew_gets_a_new_budget() -> None:
    failed = {"event": "attempt_failed", "step": 7, "committed": 5, "raised": ""}
    assert failures(RunHistory([failed, {"event": "resumed"}, failed])) == [Failure(7, 5)] * 2
    gave_up = {"event": "gave_up", "code": 1, "reason": "", "step": 7, "node": "", "raised": ""}
    whole = {**gave_up, "see": [], "advice": ""}
    assert failures(RunHistory([failed, whole, failed])) == [Failure(7, 5)]


@pytest.mark.parametrize(
    ("failure", "earlier", "worked", "mark"),
    [
        (Failure(0, None), [], False, False),
        (Failure(1, None), [Failure(1, None)], False, False),
        (Failure(2, None), [], False, True),
        (Failure(0, None), [Failure(2, None)], False, True),
        (Failure(0, 10), [], False, True),
        (Failure(0, None), [], True, True),
        (Failure(0, 10, code=ExitCode.BAD_DATA), [], False, False),
        (Failure(11, 10, code=ExitCode.BAD_DATA), [], False, True),
    ],
)
def test_only_what_has_made_a_step_is_marked(
    failure: Failure, earlier: list[Failure], worked: bool, mark: bool
) -> None:
    assert prevents_restart(failure, earlier, worked) is mark
