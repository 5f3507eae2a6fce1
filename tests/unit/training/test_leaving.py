"""A loop is left by hand or by an exception, and that is told apart in each way, on each Python."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import scaled

from kempner.training import leaving

WAYS = Path(__file__).with_name("ways_to_leave.py")
OTHERS = (shutil.which(f"python3.{minor}") for minor in (11, 12, 13, 14))


def runs(python: str) -> bool:
    """Whether it is one: pyenv's shims are there for versions that nothing selects."""
    return subprocess.run([python, "-c", ""], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("python", [sys.executable, *filter(None, OTHERS)])
def test_ways_to_leave_a_loop_are_told_apart(python: str) -> None:
    if not runs(python):
        pytest.skip(f"{python} does not run here")
    command = [python, WAYS, leaving.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=scaled(60), check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
