"""Where a run stands, in few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint.store.inventory import locate
from kempner.cli.insight.status import table_row
from kempner.insight.progress import Progress, measure
from kempner.insight.status import DEAD, UNSETTLED, gather, read_status, summarise
from kempner.run.control.protocol import Phase, Report
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import Lease
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.events import LastReport
from kempner.supervisor.control.rank_status import RankStatusFile


@pytest.mark.parametrize(
    ("places", "expected"),
    [
        ({}, ()),
        ({3: (7, "step")}, (("rank 3", "step 7, step"),)),
        (
            {r: (7, "save" if r == 2 else "step") for r in (0, 1, 2, 3, 5)},
            (("rank 2", "step 7, save"), ("ranks 0-1, 3, 5", "step 7, step")),
        ),
        (dict.fromkeys(range(16384), (9, "exit")), (("ranks 0-16383", "step 9, exit"),)),
    ],
)
def test_ranks_in_the_same_place_are_named_together(
    places: dict[int, tuple[int, str]], expected: tuple[tuple[str, str], ...]
) -> None:
    ranks = [{"rank": r, "step": step, "phase": phase} for r, (step, phase) in places.items()]
    assert gather(ranks) == expected
    assert gather(reversed(ranks)) == expected


def test_what_the_supervisor_heard_is_what_the_status_says(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    assert read_status(run, RunHistory()).ranks == ()
    attempt = begin_attempt(run)
    assert read_status(run, RunHistory()).ranks == ()
    seen = {rank: LastReport(Report(12, Phase.EVAL, 1.0, 2.0), at=0.0) for rank in (1, 0)}
    RankStatusFile(run.ranks(attempt.number)).update(seen)
    assert read_status(run, RunHistory()).ranks == ()  # nobody is there any more
    lease = Lease.acquire(run, lasts=45.0)
    assert read_status(run, RunHistory()).ranks == (("ranks 0-1", "step 12, eval"),)
    over = RunHistory([{**ended("rank 1 exited with code 1"), "attempt": attempt.number}])
    assert read_status(run, over).ranks == ()  # of an attempt that is over
    lease.release()


def test_the_lease_tells_whether_a_run_goes_on(tmp_path: Path) -> None:
    run, history = RunDirectory(tmp_path / "run"), RunHistory([STARTED])
    assert read_status(run, history).state == "ended without a message"
    lease = Lease.acquire(run, lasts=45.0)
    assert read_status(run, history).state == "running"
    lease.release()
    assert read_status(run, history).state == "ended without a message"


def test_the_newest_checkpoint_is_found_where_the_run_says_that_it_is(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.attempts.mkdir(parents=True)
    committed = {"event": "checkpoint_committed", "step": 20, "bytes": 1, "took": None}
    for step, folder in ((10, run.checkpoints), (20, tmp_path / "big"), (30, tmp_path / "disk")):
        (folder / f"step-{step:08}").mkdir(parents=True)
        (folder / "latest").symlink_to(f"step-{step:08}")
    assert latest(run) == 10
    run.config.write_text("[checkpoint]\n")
    assert latest(run) == 10
    run.config.write_text(f'[checkpoint]\ndir = "{tmp_path}/big"\n')
    assert latest(run) == 20
    changed = run.attempt(begin_attempt(run).number) / "config.toml"
    assert latest(run) == 20
    changed.write_text(f'[checkpoint]\ndir = "{tmp_path}/disk"\n')
    assert latest(run) == 30
    assert locate(run.path)[0].path == tmp_path / "disk"
    # Relative to where the run was started: the ledger knows, too.
    changed.write_text('[checkpoint]\ndir = "somewhere/else"\n')
    assert latest(run, committed) == 20


def latest(run: RunDirectory, *lines: dict[str, Any]) -> int | None:
    return read_status(run, RunHistory(lines)).latest_checkpoint


STARTED = {"event": "attempt_started", "ranks": 2}


def failed(reason: str) -> dict[str, Any]:
    return {**ended(reason), "code": 1}


def requested(reason: str) -> dict[str, Any]:
    said = {"sentence": "", "seconds_left": 30.0}
    return {"event": "stop_requested", "reason": reason, **said}


def stopped(reason: str) -> dict[str, Any]:
    return {"event": "stopped", "reason": reason, "step": 7, "lost_steps": 0}


def ended(reason: str) -> dict[str, Any]:
    said = {"code": 75, "culprit": None, "exits": {}}
    return {"event": "attempt_ended", "reason": reason, **said}


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ([], "not started"),
        ([STARTED], UNSETTLED),
        ([requested("time_limit")], "asked to stop (time limit)"),
        ([requested("signal"), stopped("cancel")], "stopped (cancel)"),
        ([stopped("SIGNAL")], "stopped"),
        ([stopped("signal"), ended("stopped (preemption)")], "stopped (preemption)"),
    ],
)
def test_the_state_names_the_reason_of_a_stop(lines: list[dict[str, Any]], state: str) -> None:
    assert summarise(RunHistory(lines), [], None).state == state


@pytest.mark.parametrize(
    ("lines", "alive", "state"),
    [
        ([STARTED], True, "running"),
        ([STARTED], False, DEAD),
        ([STARTED], None, UNSETTLED),
        ([requested("time_limit")], True, "asked to stop (time limit)"),
        ([requested("time_limit")], False, f"asked to stop (time limit), and {DEAD}"),
        ([failed("rank 0 exited with code 3")], False, "rank 0 exited with code 3"),
        (
            [failed("rank 0 exited with code 3")],
            True,
            "running; the last attempt: rank 0 exited with code 3",
        ),
        ([stopped("signal"), ended("stopped (signal)")], True, "stopped (signal)"),
        ([failed("rank 0 exited with code 3"), STARTED], True, "running"),
    ],
)
def test_whether_the_run_is_owned_decides_between_the_ends(
    lines: list[dict[str, Any]], alive: bool | None, state: str
) -> None:
    assert summarise(RunHistory(lines), [], None, alive).state == state


def step(number: int, **fields: object) -> dict[str, object]:
    made = {"tokens": 100 * number, "time": 1000.0 + 2 * number, "attempt": 1}
    return {"step": number, "loss": 2.0, **made, **fields}


@pytest.mark.parametrize(
    ("lines", "progress"),
    [
        ([], Progress(total=90)),
        ([step(10)], Progress(10, 90, 2.0)),
        ([step(10), step(30)], Progress(30, 90, 2.0, 50.0, 120.0)),
        # Of another attempt: the time between the two was none of training.
        ([step(10, attempt=1), step(30, attempt=2)], Progress(30, 90, 2.0)),
        ([step(10), step(30), {"step": 30, "eval_loss": 1.5}], Progress(30, 90, 2.0, 50.0, 120.0)),
        ([step(10), step(30, loss=None)], Progress(30, 90, None, 50.0, 120.0)),
        ([step(30), step(30)], Progress(30, 90, 2.0)),
        ([{"loss": 1.0}, {"loss": 1.0, "step": "x"}], Progress(total=90)),
        ([step(80), step(100)], Progress(100, 90, 2.0, 50.0, 0.0)),
    ],
)
def test_speed_and_time_left_are_those_of_the_last_steps(
    lines: list[dict[str, object]], progress: Progress
) -> None:
    assert measure(lines, 90) == progress


@pytest.mark.parametrize("columns", [24, 40, 80, 200, None])
def test_a_row_fits_the_terminal_and_keeps_every_word(columns: int | None) -> None:
    value = "rank 0 exited with code 3: the program that is called train.py has failed"
    lines = table_row("state", value, columns)
    assert " ".join(" ".join(lines).split()).replace("state: ", "state ") == f"state {value}"
    assert all(len(line) <= (columns or 1000) for line in lines)
