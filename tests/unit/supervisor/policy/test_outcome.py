"""What the end of an attempt means, as a table."""

from __future__ import annotations

import signal

import pytest

from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.process.signals import ReceivedSignal, insists
from kempner.supervisor.policy.outcome import (
    Decision,
    RankExit,
    after_training,
    decide_outcome,
    ended_by_signal,
    failed,
    left_early,
)
from kempner.supervisor.policy.restart import FAILURES

NONE, LIMIT, GROW = StopReason.NONE, StopReason.TIME_LIMIT, StopReason.GROW
KILL, TERM, SEGV = -signal.SIGKILL, -signal.SIGTERM, -signal.SIGSEGV


def ends(*statuses: int | None, ours: tuple[int, ...] = ()) -> list[RankExit]:
    return [RankExit(r, status, r in ours) for r, status in enumerate(statuses)]


@pytest.mark.parametrize(
    ("exits", "stop", "code", "words"),
    [
        (ends(0), NONE, ExitCode.COMPLETED, "completed"),
        (ends(0, 0), LIMIT, ExitCode.COMPLETED, "completed"),
        (ends(75, 75), LIMIT, ExitCode.STOPPED, "stopped (time limit); start again"),
        (ends(75, 75), NONE, ExitCode.STOPPED, "stopped; start again"),
        (ends(75, 76), LIMIT, ExitCode.STOPPED, "start again"),
        (ends(TERM, 75), LIMIT, ExitCode.STOPPED, "start again"),
        (ends(TERM, 76), NONE, ExitCode.CRASHED, "rank 0 was killed by SIGTERM"),
        (ends(1, 76), NONE, ExitCode.CRASHED, "rank 0 exited with code 1 (crashed)"),
        (ends(76, 1), NONE, ExitCode.CRASHED, "rank 1 exited with code 1 (crashed)"),
        (ends(76, KILL), NONE, ExitCode.CRASHED, "rank 1 was killed by SIGKILL"),
        (ends(KILL, SEGV, ours=(0,)), NONE, ExitCode.CRASHED, "rank 1 was killed by SIGSEGV"),
        (ends(75, 74), LIMIT, ExitCode.CHECKPOINT_FAILED, "rank 1 exited with code 74"),
        (ends(65, 65), NONE, ExitCode.BAD_DATA, "rank 0 exited with code 65 (bad_data)"),
        (ends(2, 76), NONE, ExitCode.USAGE, "rank 0"),
        (ends(78, 78), NONE, ExitCode.DIVERGED, "rank 0"),
        (ends(99, 76), NONE, ExitCode.CRASHED, "rank 0 exited with code 99"),
        (ends(76, 76), NONE, ExitCode.PEERS_LOST, "every rank lost a peer"),
        ([RankExit(1, 76, sentence="at train.py:3: Timed out"), *ends(76)], NONE,
         ExitCode.PEERS_LOST, "every rank lost a peer, rank 1 first: at train.py:3: Timed out"),
        (ends(76, 0), NONE, ExitCode.PEERS_LOST, "rank 1 left with 0 while rank 0 waited for it"),
        (ends(KILL, 0, ours=(0,)), NONE, ExitCode.PEERS_LOST, "every rank lost a peer"),
        (ends(75, KILL, ours=(1,)), LIMIT, ExitCode.STOPPED,
         "stopped (time limit); start again to continue (rank 1 did not leave in time and was kil"),
        (ends(KILL, None, 75, ours=(0, 1)), LIMIT, ExitCode.STOPPED, "(2 ranks, 0 among them, did"),
        (ends(0, 1), NONE, ExitCode.CRASHED, "rank 1"),
        (ends(None, 76), NONE, ExitCode.CRASHED, "rank 0 disappeared without a message"),
        (
            ends(None, 75),
            LIMIT,
            ExitCode.STOPPED,
            "rank 0 disappeared without a message while it stopped (time limit)",
        ),
        (ends(76, KILL), LIMIT, ExitCode.STOPPED, "rank 1 was killed by SIGKILL while it stopped"),
        (ends(76, SEGV), LIMIT, ExitCode.CRASHED, "rank 1 was killed by SIGSEGV"),
        (ends(1, 76), LIMIT, ExitCode.CRASHED, "rank 0 exited with code 1 (crashed)"),
        # A stop after which the run continues at once hides no failure.
        (ends(75, 75), GROW, ExitCode.STOPPED, "stopped to continue on more nodes"),
        (ends(76, KILL), GROW, ExitCode.CRASHED, "rank 1 was killed by SIGKILL"),
        (ends(None, 75), GROW, ExitCode.CRASHED, "rank 0 disappeared without a message"),
        (ends(None, KILL, ours=(0,)), NONE, ExitCode.CRASHED, "rank 1 was killed by SIGKILL"),
    ],
)  # fmt: skip
def test_outcome(exits: list[RankExit], stop: StopReason, code: ExitCode, words: str) -> None:
    decision = decide_outcome(exits, stop_requested=stop)
    assert decision.code is code
    assert words in decision.reason


def test_the_last_words_of_the_first_to_fail_are_repeated() -> None:
    exits = [
        RankExit(3, 76, sentence="rank 1 is lost"),
        RankExit(1, 65, sentence="no checkpoint verifies\nand more"),
        RankExit(0, 1, sentence="KeyError: 0"),
    ]
    decision = decide_outcome(exits)
    assert decision.reason == "rank 1 exited with code 65 (bad_data): no checkpoint verifies"
    assert decision.culprit == 1


def test_only_a_rank_itself_can_say_what_it_raised() -> None:
    """What srun says of a rank that was killed from outside is no fault of the program."""
    assert RankExit(1, 1, sentence="KeyError: 0\nat step 5").raised == "KeyError: 0"
    assert RankExit(1, KILL).raised == ""
    assert RankExit(1, None, sentence="srun ended with 137").raised == ""


def test_completed_and_stopped_ranks_do_not_end_the_others() -> None:
    assert not failed(RankExit(0, 0))
    assert not failed(RankExit(0, 75))
    assert failed(RankExit(0, 1))
    assert failed(RankExit(0, KILL))


@pytest.mark.parametrize(
    ("received", "expected"),
    [
        ([], False),
        ([("SIGINT", 1.0)], False),
        ([("SIGINT", 1.0), ("SIGINT", 2.9)], True),
        ([("SIGINT", 1.0), ("SIGINT", 3.1)], False),
        ([("SIGTERM", 1.0), ("SIGTERM", 1.1)], False),
        ([("SIGINT", 1.0), ("SIGTERM", 1.1), ("SIGINT", 2.0)], True),
        ([("SIGINT", 1.0), ("SIGINT", 5.0), ("SIGINT", 6.0)], True),
    ],
)
def test_only_a_quick_second_ctrl_c_insists(
    received: list[tuple[str, float]], expected: bool
) -> None:
    assert insists([ReceivedSignal(signal.Signals[name], at) for name, at in received]) is expected


@pytest.mark.parametrize(
    ("exits", "code", "words"),
    [
        (ends(0, 0), ExitCode.COMPLETED, "completed"),
        (ends(75, 75), ExitCode.STOPPED, "stopped"),
        (
            ends(76, 0),
            ExitCode.AFTER_TRAINING,
            "the program failed after its loop: rank 0 exited with code 76 (peers_lost) (rank 1 "
            "had left with 0)",
        ),
        (ends(1, 1), ExitCode.AFTER_TRAINING, "after its loop: rank 0 exited with code 1"),
        (ends(SEGV, KILL, ours=(1,)), ExitCode.AFTER_TRAINING, "rank 0 was killed by SIGSEGV"),
        # Another node, or more memory, may be all that it takes.
        (ends(KILL, 76), ExitCode.CRASHED, "rank 0 was killed by SIGKILL"),
        (ends(None, 76), ExitCode.CRASHED, "rank 0 disappeared"),
    ],
)
def test_what_fails_after_training_is_no_failure_of_the_training(
    exits: list[RankExit], code: ExitCode, words: str
) -> None:
    decision = after_training(decide_outcome(exits), exits)
    assert decision.code is code
    assert words in decision.reason


def test_a_hang_after_training_keeps_its_sentence() -> None:
    hang = Decision(ExitCode.HUNG, "rank 0 is in barrier at x.py:3", 0)
    decision = after_training(hang, ends(KILL, KILL, ours=(0, 1)))
    assert (decision.code, decision.culprit) == (ExitCode.AFTER_TRAINING, 0)
    assert decision.reason.endswith(hang.reason)


def test_an_exit_with_0_after_a_signal_is_a_stop_that_goes_on() -> None:
    told = ended_by_signal(decide_outcome(ends(0, 0)), StopReason.PREEMPTION)
    assert told.code is ExitCode.STOPPED
    assert told.reason.endswith("not complete (preemption); start again to continue")
    assert ended_by_signal(decide_outcome(ends(0)), NONE).code is ExitCode.STOPPED


def test_what_slurm_has_not_started_is_no_failure_of_the_run() -> None:
    refused = [RankExit(0, None, sentence="Invalid generic resource", unstarted=True)]
    for others in ([], ends(1, None)):
        told = decide_outcome([*others, *refused])
        assert (told.code, told.scheduler, told.culprit) == (ExitCode.STOPPED, True, None)
        assert told.reason == "the ranks cannot be started here: Invalid generic resource"
        assert told.code not in FAILURES  # so it counts towards no end


def test_a_loop_that_was_left_early_is_not_complete() -> None:
    decision = left_early(decide_outcome(ends(0, 0)), 12)
    assert (decision.code, decision.left_at) == (ExitCode.COMPLETED, 12)
    assert "after step 12 with 0, before its last step: not complete" in decision.reason
