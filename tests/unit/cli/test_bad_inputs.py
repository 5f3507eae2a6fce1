"""Whatever is typed, and whatever lies on the disk: one sentence with the culprit, and its code."""

from __future__ import annotations

import re
import shlex
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bad_inputs import TEMPLATE, Row, config_files, contents, make, overrides, paths, words
from saved import commit_state

from kempner.cli.entry import main
from kempner.run.process.signals import inbox
from kempner.run.record.events import AttemptStarted
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RUN_LINE, RunDirectory

ROWS = [*config_files.ROWS, *overrides.ROWS, *words.ROWS, *paths.ROWS, *contents.ROWS]

FOREIGN = ("Traceback", "Errno", "Error(", "pydantic", "typer", "click", "tomli", "Input should")
"""What libraries and Python say."""

LONGEST = 600


def test_there_are_rows_enough() -> None:
    assert len(ROWS) >= 300
    assert len({(row.command, repr(row.files), row.words) for row in ROWS}) == len(ROWS)


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What every row finds."""
    folder = tmp_path_factory.mktemp("bad") / "template"
    folder.mkdir()
    make(folder, TEMPLATE)
    run = RunDirectory(folder / "run")
    for step in (10, 20):
        commit_state(run, {"model.weight": torch.ones(4, 4)}, step, world=2)
    Ledger(run.ledger).record(AttemptStarted(2), attempt=2)
    return folder


@pytest.fixture
def folder(template: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The working directory of a row; the signals are pytest's again afterwards."""
    work = tmp_path / "work"
    shutil.copytree(template, work, symlinks=True)
    monkeypatch.chdir(work)
    monkeypatch.setenv("PATH", str(tmp_path))  # a machine without Slurm
    for name in ("SLURM_JOB_ID", "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    yield work
    inbox().uninstall()


def say(sentence: str, words: str) -> bool:
    """Whether the sentence holds the words; three dots stand for anything between them."""
    return re.search(".*".join(map(re.escape, words.split(" ... "))), sentence) is not None


def name_of(row: Row) -> str:
    command = row.command if isinstance(row.command, str) else shlex.join(row.command)
    return re.sub(r"[^ -~]", "?", f"{command[:60]}: {row.words[:40]}")


@pytest.mark.parametrize("row", ROWS, ids=name_of)
def test_a_bad_input_gets_one_sentence_and_the_code_of_its_cause(
    row: Row, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    make(folder, row.files)
    for name, value in row.environ.items():
        monkeypatch.setenv(name, value)
    arguments = shlex.split(row.command) if isinstance(row.command, str) else row.command

    with pytest.raises(SystemExit) as left:
        main(arguments)

    told = capsys.readouterr()
    assert left.value.code == row.code, told
    assert not any(word in told.out + told.err for word in FOREIGN), told
    if row.on_stdout:
        assert say(told.out, row.words), told
        return
    assert [line for line in told.out.splitlines() if not line.startswith(RUN_LINE)] == []
    assert told.err.endswith("\n")
    *progress, sentence = told.err.splitlines()
    assert all(line.startswith("preparing: ") for line in progress), told.err
    assert sentence.startswith("kempner: ")
    assert len(sentence) < LONGEST
    assert say(sentence, row.words), sentence
