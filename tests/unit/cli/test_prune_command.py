"""`kempner prune`: which logs may go, and that nothing else does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kempner.cli.entry import main
from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.attempts import (
    AttemptLogs,
    begin_attempt,
    decide_fates,
)
from kempner.run.record.gave_up import GaveUp, write
from kempner.run.record.run_dir import RunDirectory

Captured = pytest.CaptureFixture[str]

DAY = 24 * 3600
NOW = 100 * DAY
LIVE = "the live attempt, or the last one"
FIVE = [AttemptLogs(number, 1000, (90 + number) * DAY) for number in (3, 1, 2, 5, 4)]


@pytest.mark.parametrize(
    ("keep_last", "older_than", "needed", "going"),
    [
        (2, 0, {5: LIVE}, [1, 2, 3]),
        (2, 0, {2: LIVE}, [1, 3]),
        (2, 0, {5: LIVE, 3: "GAVE_UP names it"}, [1, 2]),
        (1, 7 * DAY, {5: LIVE}, [1, 2, 3]),
        (1, 7 * DAY + 1, {5: LIVE}, [1, 2]),
        (4, 7 * DAY, {5: LIVE}, [1]),
        (1, 0, {}, [1, 2, 3, 4]),
        (9, 0, {}, []),
    ],
)
def test_what_goes(
    keep_last: int, older_than: float, needed: dict[int, str], going: list[int]
) -> None:
    fates = decide_fates(FIVE, needed, NOW, keep_last, older_than)
    assert [fate.logs.number for fate in fates] == [1, 2, 3, 4, 5]
    assert [fate.logs.number for fate in fates if fate.goes] == going
    assert all(fate.goes == (fate.why == "") for fate in fates)


def prune(*arguments: str | Path) -> int | str | None:
    with pytest.raises(SystemExit) as left:
        main(["prune", *map(str, arguments)])
    return left.value.code


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    """Four attempts, of which the first two were last written to 40 days ago; it gave up once."""
    run = RunDirectory(tmp_path / "run")
    for number in range(1, 5):
        begin_attempt(run)
        run.log(number, 0).write_text("{}\n" * 5000)
        if number < 3:
            for path in (run.log(number, 0), run.attempt(number)):
                then = path.stat().st_mtime - 40 * DAY
                os.utime(path, (then, then))
    for file in (run.ledger, run.metrics, run.config):
        file.write_text("\n")
    write(run, GaveUp(ExitCode.CRASHED, attempt=1))
    return run


def test_only_the_folders_of_old_attempts_go(run: RunDirectory, capsys: Captured) -> None:
    before = {path for path in run.path.rglob("*") if not path.is_relative_to(run.attempt(2))}
    assert prune(run.path, "--older-than=30d", "--dry-run") == 0
    dry = capsys.readouterr().out
    assert "would go  attempts/2        40 d" in dry
    assert run.attempt(2).exists()
    assert prune(run.path, "--older-than=30d") == 0
    wet = capsys.readouterr().out
    assert set(run.path.rglob("*")) == before
    told = [line.split()[:2] for line in wet.splitlines()[:-1]]
    stays = [["stays", "attempts/1"], ["stays", "attempts/3"], ["stays", "attempts/4"]]
    assert told == [stays[0], ["gone", "attempts/2"], *stays[1:]]
    assert "1 of 4 attempts deleted, which freed " in wet
    assert begin_attempt(run).number == 5


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "--older-than AGE or --keep-last N"),
        (["--older-than=3x"], "--older-than 3x is not an age"),
        (["--keep-last=0"], "--keep-last"),
    ],
)
def test_what_cannot_be_done(
    run: RunDirectory, arguments: list[str], words: str, capsys: Captured
) -> None:
    assert prune(run.path, *arguments) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1
    assert run.attempt(2).exists()


def test_without_knowing_the_live_attempt_nothing_goes(run: RunDirectory, capsys: Captured) -> None:
    (run.attempts / "CURRENT").write_text("torn")
    assert prune(run.path, "--keep-last=1") == 65
    assert "CURRENT is damaged" in capsys.readouterr().err
    assert run.attempt(2).exists()
    assert prune(run.path / "attempts", "--keep-last=1") == 2
    assert "is not a run: it has no ledger.jsonl" in capsys.readouterr().err
