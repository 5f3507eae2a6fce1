"""What a loop changes without registering it comes back, or is told in a sentence in time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from harness import ROOT
from patience import scaled

FIRST_SAVE = 4


def told_by(program: str, folder: Path) -> dict[str, Any]:
    command = [sys.executable, str(Path(__file__).with_name(program)), str(folder / "runs")]
    path = os.pathsep.join(map(str, (ROOT, ROOT / "tests")))
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=scaled(200),
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_stopped_loop_is_what_it_would_have_been(tmp_path: Path) -> None:
    """With its groups and parameters built in the opposite order, too."""
    differing = told_by("loops.py", tmp_path)
    assert len(differing) >= 10
    assert {name: stops for name, stops in differing.items() if stops} == {}


SENTENCES = {
    "scheduler": (1, "schedule (StepLR) steps in the loop, and no checkpoint holds it"),
    "scheduler_by_epoch": (FIRST_SAVE, "a StepLR steps"),
    "schedulers_in_turn": (1, "a SequentialLR steps"),
    "plateau": (1, "a ReduceLROnPlateau steps"),
    "scheduler_made_in_the_loop": (FIRST_SAVE, "StepLR"),
    "another_optimizer": (1, "a Adam steps"),
    "averaged": (1, "a AveragedModel changes"),
    "teacher_now_and_then": (FIRST_SAVE, "a Sequential changes"),
    "scaler": (1, "a GradScaler steps"),
    "shuffled_loader": (1, "the loop reads a DataLoader from step to step"),
    "loader_in_cycles": (2, "the loop reads a DataLoader from step to step"),
    "loader_of_the_loop": (2, "the loop reads a DataLoader from step to step"),
    "changed_before_the_loop": (1, "1.running_mean was changed between survive() and the loop"),
}
"""After which step at the latest, and in which words."""

EXACT = {
    "plain",
    "scheduler_that_rests",
    "inner_optimizer",
    "frozen_teacher",
    "whole_evaluations",
    "resumable_loader",
    "held_within",
}


def test_what_is_not_held_is_told_by_the_first_save(tmp_path: Path) -> None:
    told = told_by("unheld.py", tmp_path)
    assert {name for name, said in told.items() if said is None} == EXACT
    late = told.pop("late_buffer")
    assert "model.late appeared after the start" in late[1]
    for name, (step, words) in SENTENCES.items():
        assert told[name][0] <= step, name
        assert words in told[name][1], told[name]
