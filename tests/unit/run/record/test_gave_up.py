"""The mark of a run that was given up: what it says, and that it is obeyed."""

from __future__ import annotations

from pathlib import Path

import pytest
import tomli
from harness import wait_until

from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.attempts import begin_attempt, outdated, prune_attempts
from kempner.run.record.gave_up import GaveUp, GaveUpError, read, refuse_if_given_up, write
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import Failure
from kempner.supervisor.recovery import give_up


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return RunDirectory(tmp_path)


HUNG = Decision(ExitCode.HUNG, "no rank has moved for 9 s", 3)
FAILURE = Failure(step=30, committed=20, raised='ValueError: "a"\\b')


def test_the_verdict_says_who_where_when_why_and_what_to_do(run: RunDirectory) -> None:
    attempt = begin_attempt(run)
    run.stacks(1, 3).write_text("stacks")
    told = give_up(run, Ledger(run.ledger), attempt, HUNG, FAILURE, "node7")
    assert str(told).splitlines() == [
        "gave up after attempt 1: no rank has moved for 9 s",
        '  failed first: rank 3 on node7, at step 30: ValueError: "a"\\b',
        f"  see: {run.stacks(1, 3)}",
        "  what to do: look in the stacks for what each rank was waiting for; then delete "
        f"{run.gave_up}, and start again",
    ]
    assert read(run) == told
    assert tomli.loads(run.gave_up.read_text())["step"] == 30
    (event,) = read_lines(run.ledger)
    assert (event["event"], event["code"], event["node"]) == ("gave_up", 77, "node7")
    with pytest.raises(GaveUpError, match="gave up on this run before") as refusal:
        refuse_if_given_up(run)
    assert refusal.value.code is ExitCode.HUNG
    run.gave_up.unlink()
    refuse_if_given_up(run)


@pytest.mark.parametrize("code", [c for c in ExitCode if c in (1, 65, 74, 76, 77, 78)])
def test_every_end_has_its_advice(run: RunDirectory, code: ExitCode) -> None:
    ledger, attempt = Ledger(run.ledger), begin_attempt(run)
    told = give_up(run, ledger, attempt, Decision(code, "so"), Failure(0, None), "")
    assert told.first is None
    assert str(run.supervisor_log(1)) in str(told)
    assert "failed first" not in str(told)
    assert read(run) == told


def test_an_attempt_that_was_overtaken_gives_up_nothing(run: RunDirectory) -> None:
    attempt = begin_attempt(run)
    begin_attempt(run)
    give_up(run, Ledger(run.ledger), attempt, HUNG, FAILURE, "node7")
    assert read(run) is None
    assert not run.ledger.exists()


@pytest.mark.parametrize("content", ["", "I said so", "code = 99", "code = 1\nwho = 'me'"])
def test_a_mark_made_by_hand_is_obeyed(run: RunDirectory, content: str) -> None:
    run.gave_up.write_text(content)
    with pytest.raises(GaveUpError) as refusal:
        refuse_if_given_up(run)
    assert refusal.value.code is ExitCode.CRASHED


def test_no_mark_is_no_mark(tmp_path: Path) -> None:
    assert read(RunDirectory(tmp_path / "nowhere")) is None
    write(RunDirectory(tmp_path), GaveUp(ExitCode.DIVERGED))
    assert read(RunDirectory(tmp_path)) == GaveUp(ExitCode.DIVERGED)


def test_logs_of_old_attempts_are_deleted_but_not_those_that_say_why_it_gave_up(
    run: RunDirectory,
) -> None:
    for number in range(1, 13):
        assert begin_attempt(run).number == number
        run.log(number, 0).write_text("{}\n")
    write(run, GaveUp(ExitCode.CRASHED, attempt=4))
    prune_attempts(run, keep=3)
    kept = lambda: sorted(int(p.name) for p in run.attempts.iterdir() if p.is_dir())  # noqa: E731
    wait_until(lambda: kept() == [4, 10, 11, 12], "the others to be deleted", 20)
    assert run.log(4, 0).exists()
    assert begin_attempt(run).number == 13
    assert outdated([3, 1, 2], keep=3, given_up=None) == []
