"""What follows a run of Lightning's: started again, gone on with, or another one in its process.

Where it is stopped and killed, the matrix plays: tests/matrix/test_lightning.py.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import warm

from kempner.run.process.exit_codes import ExitCode

OWN = Path(__file__).with_name("own")


def fit(folder: Path, *names: str, trouble: str = "", **options: object) -> int:
    """Start the program; its exit code."""
    folder.mkdir(exist_ok=True)
    path = os.pathsep.join(filter(None, [str(OWN), os.environ.get("PYTHONPATH")]))
    environ = {**os.environ, "PYTHONPATH": path, "TROUBLE": trouble, "OMP_NUM_THREADS": "1"}
    (folder / "options.json").write_text(json.dumps(options))
    command = [sys.executable, str(OWN / "lightning_fits.py"), *names]
    with open(folder / "out.txt", "ab") as out:
        return warm.start(command, environ, out, folder).wait()


def notes(folder: Path) -> list[Any]:
    return [json.loads(line) for line in (folder / "notes.jsonl").read_text().splitlines()]


def ends(folder: Path) -> list[Any]:
    return [note for note in notes(folder) if note[1] == "end"]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("runs/*/checkpoints/step-*"))


def test_a_complete_run_makes_no_step_and_no_validation_again(tmp_path: Path) -> None:
    """Also where its end was not to be seen before its last validation, and the step was saved."""
    options: dict[str, object] = {"max_epochs": 9, "early": True, "num_sanity_val_steps": 0}
    assert fit(tmp_path, "early", **options) == 0, (tmp_path / "out.txt").read_text()
    made, saved = notes(tmp_path), checkpoints(tmp_path)
    assert made[-1][1:4] == ["end", 12, 2]
    assert fit(tmp_path, "early", **options) == 0
    assert notes(tmp_path) == [*made, made[-1]]
    assert checkpoints(tmp_path) == saved
    assert saved[-1] == "step-00000012"


def test_a_complete_run_goes_on_as_one_that_was_to_be_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of an epoch and within one. The command is another, which is accepted."""
    monkeypatch.setenv("KEMPNER_ACCEPT_CHANGES", "command")
    for kind, few, many in (("max_epochs", 2, 3), ("max_steps", 9, 15)):
        longer, whole = tmp_path / f"{kind}-longer", tmp_path / f"{kind}-whole"
        for most in (few, many):
            assert fit(longer, "line", **{kind: most}) == 0
        assert fit(whole, "line", **{kind: many}) == 0
        assert ends(longer)[-1] == ends(whole)[-1]
        steps = [note for note in notes(longer) if note[1] == "step"]
        assert steps == [note for note in notes(whole) if note[1] == "step"]


def test_trainers_in_one_process_have_runs_of_their_own(tmp_path: Path) -> None:
    calm, struck = tmp_path / "calm", tmp_path / "struck"
    assert fit(calm, "first", "troubled", max_epochs=2) == 0
    trouble = "stop@7 kill@10"
    codes = [fit(struck, "first", "troubled", trouble=trouble, max_epochs=2) for _ in range(3)]
    assert codes[0] == ExitCode.STOPPED
    assert codes[2] == 0, (struck / "out.txt").read_text()
    first, second = (ends(struck)[-2], ends(struck)[-1])
    assert [first, second] == ends(calm)
    made = {tuple(note[:3]): note for note in notes(struck) if note[1] == "step"}
    assert list(made.values()) == [note for note in notes(calm) if note[1] == "step"]
