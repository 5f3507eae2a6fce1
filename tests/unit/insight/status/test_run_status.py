"""What is read of a run, and in which words it is shown."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest

from kempner.checkpoint.store.retention import locate
from kempner.cli.insight.status_words import checkpoint
from kempner.cli.insight.triage import table_row
from kempner.insight.run_reader import (
    ATTEMPTS,
    KEPT,
    CheckpointFacts,
    RankPlace,
    RunReader,
    judge_lease,
)
from kempner.insight.status.runs import find_runs, places
from kempner.insight.status.summary import Status, gather, measure, summarise
from kempner.run.control.protocol import Phase, Report
from kempner.run.record.attempts import begin_attempt
from kempner.run.record.lease import RELEASED, Holder, Lease, LeaseReading
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.control.rank_connections import RankStatusFile


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, []),
        ({3: (7, "step")}, [("rank 3", "step 7, step")]),
        (
            {r: (7, "save" if r == 2 else "step") for r in (0, 1, 2, 3, 5)},
            [("rank 2", "step 7, save"), ("ranks 0-1, 3, 5", "step 7, step")],
        ),
        (dict.fromkeys(range(16384), (9, "exit")), [("ranks 0-16383", "step 9, exit")]),
    ],
)
def test_ranks_in_the_same_place_are_named_together(
    where: dict[int, tuple[int, str]], expected: list[tuple[str, str]]
) -> None:
    ranks = [RankPlace(r, step, phase) for r, (step, phase) in where.items()]
    for given in (ranks, reversed(ranks)):
        assert [(group.name, group.place) for group in gather(given)] == expected


def write(run: RunDirectory, *lines: dict[str, Any]) -> None:
    run.path.mkdir(exist_ok=True)
    whole = [{"time": 100.0, "attempt": 1, **line} for line in lines]
    with run.ledger.open("a") as ledger:
        ledger.writelines(json.dumps(line) + "\n" for line in whole)


def read(run: RunDirectory) -> Status:
    return summarise(RunReader(run).read())


STARTED = {"event": "attempt_started", "ranks": 2}
ENDED = {"event": "attempt_ended", "code": 1, "reason": "", "culprit": 1, "exits": {}}


def test_what_the_supervisor_heard_is_what_the_status_says(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    write(run, STARTED)
    assert read(run).ranks.groups == ()
    attempt = begin_attempt(run)
    assert read(run).ranks.groups == ()
    seen = {rank: LastReport(Report(12, Phase.EVAL, 1.0, 2.0), at=0.0) for rank in (1, 0)}
    RankStatusFile(run.ranks(attempt.number)).update(seen)
    assert read(run).ranks.groups == ()  # no supervisor is there any more
    lease = Lease.acquire(run, lasts=45.0)
    (group,) = read(run).ranks.groups
    assert (group.name, group.place) == ("ranks 0-1", "step 12, eval")
    write(run, ENDED)
    assert read(run).ranks.groups == ()  # of an attempt that is over
    lease.release()


def test_the_lease_tells_whether_a_run_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    write(run, {**STARTED, "time": time.time()})
    assert read(run).state == "ended without a message"
    lease = Lease.acquire(run, lasts=45.0)
    assert read(run).state == "starting (the ranks are launched)"
    lease.release()
    assert read(run).state == "ended without a message"


HOLDER = Holder("node1", "other", 1, 1, None, 0, "", lasts=45.0)


@pytest.mark.parametrize(
    ("beat", "age", "unchanged", "alive"),
    [
        ("5", 2.0, 0.0, True),
        ("5", 8.9, 0.0, True),
        ("5", 20.0, 0.0, None),  # by another machine's clock: look again
        ("5", -100.0, 0.0, None),
        ("5", 20.0, 9.1, False),
        ("5", 4000.0, 0.0, False),
        (RELEASED, 2.0, 0.0, False),
    ],
)
def test_a_glance_at_a_lease(beat: str, age: float, unchanged: float, alive: bool | None) -> None:
    assert judge_lease(LeaseReading(1, HOLDER, beat), age, unchanged) is alive


def test_the_newest_checkpoint_is_found_where_the_run_says_that_it_is(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.attempts.mkdir(parents=True)
    write(run)
    for step, folder in ((10, run.checkpoints), (20, tmp_path / "big"), (30, tmp_path / "disk")):
        (folder / f"step-{step:08}").mkdir(parents=True)
        (folder / f"step-{step:08}" / "manifest.json").touch()  # which makes it committed
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
    write(run, {"event": "checkpoint_committed", "step": 20})
    assert latest(run) == 20


def latest(run: RunDirectory) -> int | None:
    found = read(run).facts.checkpoint
    return None if found is None else found.step


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (None, "-"),
        (CheckpointFacts(20), "20"),
        (CheckpointFacts(20, 400.0), "20, 1 min 40 s ago"),
        (CheckpointFacts(20, 400.0, 490.0), "20, 1 min 40 s ago, verified 10 s ago"),
        (CheckpointFacts(20, 400.0, 490.0, 2), "20, 1 min 40 s ago, 2 files DAMAGED"),
        (CheckpointFacts(20, 400.0, loaded=True), "checked as the run went on from it"),
    ],
)
def test_a_checkpoint_has_an_age_and_may_be_verified(
    found: CheckpointFacts | None, words: str
) -> None:
    assert checkpoint(found, 500.0).endswith(words)


def step(number: int, **fields: object) -> dict[str, object]:
    made = {"tokens": 100 * number, "time": 1000.0 + 2 * number, "attempt": 1}
    return {"step": number, "loss": 2.0, **made, **fields}


@pytest.mark.parametrize(
    ("lines", "known"),
    [
        ([], {}),
        ([step(10)], {"step": 10, "loss": 2.0}),
        (
            [step(10, mfu=0.3), step(20, mfu=0.5), step(30, mfu=0.4)],
            {"step": 30, "loss": 2.0, "tokens_per_second": 50.0, "seconds_left": 120.0, "mfu": 0.4},
        ),
        # Of another attempt: the time between the two was none of training.
        ([step(10, attempt=1), step(30, attempt=2)], {"step": 30, "loss": 2.0}),
        (
            [step(10), step(30), {"step": 30, "eval_loss": 1.5}],
            {"step": 30, "eval_loss": 1.5, "tokens_per_second": 50.0, "seconds_left": 120.0},
        ),
        (
            [step(10), {"step": 10, "eval_sets": {"code": {"loss": 1.5, "perplexity": None}}}],
            {"step": 10, "eval_loss": None, "eval_sets": {"code": {"loss": 1.5}}},
        ),
        (  # What the first of them waited was before it.
            [
                step(10, data_seconds=9.0, wait_seconds=9.0, save_seconds=9.0),
                step(20, data_seconds=5.0, wait_seconds=0.0),
                step(30, data_seconds=7.0, wait_seconds=2.0),
            ],
            {"waited": {"data": 0.3, "others": 0.05}, "seconds_left": 120.0},
        ),
        ([step(10), step(30, loss=None)], {"step": 30, "loss": None, "seconds_left": 120.0}),
        ([step(30), step(30)], {"step": 30, "seconds_left": None}),
        ([{"loss": 1.0}, {"loss": 1.0, "step": "x"}], {"step": None}),
        ([step(80), step(100)], {"step": 100, "seconds_left": 0.0}),
    ],
)
def test_speed_and_time_left_are_those_of_the_last_steps(
    lines: list[dict[str, object]], known: dict[str, object]
) -> None:
    found = measure(lines, 90)
    told = {**vars(found), **vars(found.pace)}
    assert {name: told[name] for name in known} == known
    assert found.total == 90
    if "seconds_left" not in known:
        assert (found.pace.tokens_per_second, found.pace.seconds_left) == (None, None)
    assert measure(lines, None).pace.seconds_left is None


def test_only_what_is_new_is_read_and_only_the_end_of_a_long_file(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    commits = [{"event": "checkpoint_committed", "step": n, "note": 200 * "x"} for n in range(2000)]
    for number in range(1, 13):
        lines = [STARTED, *commits, ENDED]
        write(run, *({**line, "attempt": number, "time": 10.0 * number} for line in lines))
    run.metrics.write_text("".join(json.dumps(step(n)) + "\n" for n in range(50_000)))
    reader = RunReader(run)
    before = read_bytes()
    status = summarise(reader.read())
    assert read_bytes() - before < 0.7 * run.ledger.stat().st_size
    assert status.attempt is not None
    assert (status.attempt.number, status.progress.step) == (12, 49_999)
    assert {end.attempt for end in status.ends} == set(range(8, 13))
    assert len(reader.history.entries(object)) <= KEPT + 2 * (ATTEMPTS + 1)  # type: ignore[type-var]

    before = read_bytes()
    write(run, {**STARTED, "attempt": 13, "time": 500.0})
    with run.metrics.open("a") as metrics:
        metrics.write(json.dumps(step(50_000)) + '\n{"step": 50001, "lo')
    status = summarise(reader.read())
    assert read_bytes() - before < 20_000
    assert status.attempt is not None
    assert (status.attempt.number, status.progress.step) == (13, 50_000)
    with run.metrics.open("a") as metrics:
        metrics.write('ss": 1.5}\n')
    assert reader.read().metrics.lines[-1] == {"step": 50001, "loss": 1.5}
    run.metrics.write_text(json.dumps(step(3)) + "\n")  # the user has cut it
    assert reader.read().metrics.lines == (step(3),)


def read_bytes() -> int:
    """What this process has read so far, proc_pid_io(5)."""
    fields = Path(f"/proc/{os.getpid()}/io").read_text().split()
    return int(fields[fields.index("rchar:") + 1])


def test_runs_are_found_where_the_configurations_say(tmp_path: Path) -> None:
    (tmp_path / "configs" / "train").mkdir(parents=True)
    (tmp_path / "configs" / "train" / "a.toml").write_text('[run]\ndir = "elsewhere"\n')
    (tmp_path / "configs" / "broken.toml").write_text("[run\n")
    (tmp_path / "b.toml").write_text(f'[run]\ndir = "{tmp_path}/far"\n')
    for folder in ("runs/x", "elsewhere/y", "far/z", "other/w"):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "ledger.jsonl").touch()
    (tmp_path / "runs" / "no-run").mkdir()
    found = find_runs(places(tmp_path))
    assert [run.path.name for run in found] == ["x", "y", "z"]


@pytest.mark.parametrize("columns", [24, 40, 80, 200, None])
def test_a_row_fits_the_terminal_and_keeps_every_word(columns: int | None) -> None:
    value = "rank 0 exited with code 3: the program that is called train.py has failed"
    lines = table_row("state", value, columns)
    assert " ".join(" ".join(lines).split()).replace("state: ", "state ") == f"state {value}"
    assert all(len(line) <= (columns or 1000) for line in lines)
