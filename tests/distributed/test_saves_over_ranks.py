"""Saves and loads over several ranks without the training around them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


def launch(script: str, world: int, folder: Path) -> None:
    """Run a script of this folder on some ranks, each of which says that it has seen it all."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    path = Path(__file__).with_name(script)
    done = subprocess.run(
        [*command, f"--nproc-per-node={world}", str(path), str(folder)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has seen it all") == world


@pytest.mark.parametrize("world", [2, 3])
def test_a_failure_on_one_rank_is_told_to_all_and_the_next_save_succeeds(
    tmp_path: Path, world: int
) -> None:
    launch("failing_saves.py", world, tmp_path / "run")


def test_any_world_loads_what_any_world_saved_bit_for_bit(tmp_path: Path) -> None:
    launch("reshard.py", 4, tmp_path)
