"""A save that fails on one rank fails on all, in that rank's words, and the next one succeeds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("world", [2, 3])
def test_failures_are_shared_and_passed(tmp_path: Path, world: int) -> None:
    script = Path(__file__).with_name("failing_saves.py")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, f"--nproc-per-node={world}", str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("has seen it all") == world
