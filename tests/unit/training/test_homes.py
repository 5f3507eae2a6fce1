"""Where a loop belongs: in which run, and in which folder of it."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kempner.run.process.exit_codes import UsageError
from kempner.run.record.attempts import Attempt, Fence, read_current
from kempner.run.record.run_dir import RunDirectory
from kempner.training import homes
from kempner.training.homes import Home, Loops

RUN = RunDirectory(Path("runs/train"))
ALONE: Any = SimpleNamespace(world=SimpleNamespace(rank=0), broadcast=lambda value: value)


@pytest.mark.parametrize(
    ("folder", "place"),
    [
        ("runs/train", ""),
        ("runs/train/loops/2", "loops/2"),
        ("/elsewhere/fold-3", "/elsewhere/fold-3"),
    ],
)
def test_what_the_ledger_calls_the_folder_of_a_loop(folder: str, place: str) -> None:
    assert Home(RUN, RunDirectory(Path(folder))).place == place


def test_the_run_is_chosen_once_and_later_loops_are_beside_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chosen = [Path("runs/train-2")]
    monkeypatch.setattr(homes, "_choose", lambda *_: chosen.pop())
    loops, link = Loops(), SimpleNamespace(launch=None, run=RUN)
    program: Any = None
    found = [loops.find_home(ALONE, link, None, program, ()) for _ in range(2)]  # type: ignore[arg-type]
    assert [home.run.path for home in found] == [Path("runs/train-2")] * 2
    assert [home.place for home in found] == ["", "loops/2"]


def test_a_folder_apart_has_attempts_of_its_own(tmp_path: Path) -> None:
    run, supervisors = RunDirectory(tmp_path / "run"), Attempt(7, "now")
    beside = Home(run, RunDirectory(run.path / "loops" / "2"))
    assert beside.fence(ALONE, supervisors) == Fence(run.attempts, supervisors)
    apart = Home(run, RunDirectory(tmp_path / "apart"))
    fence = apart.fence(ALONE, supervisors)
    assert fence.attempts == apart.folder.attempts
    assert fence.attempt == read_current(apart.folder.attempts)
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="cannot be written"):
        Home(run, RunDirectory(tmp_path / "file" / "apart")).fence(ALONE, supervisors)
