"""When a process began, by what the kernel says of it."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest
from harness import PYTHON

from kempner.cluster.machine import process_began

TELL = "from kempner.cluster.machine import process_began; print(process_began())"


def test_a_process_began_before_it_became_what_it_is() -> None:
    """As a batch script becomes the supervisor: the clock does not begin anew."""
    before = time.time()
    script = f"read -r go; exec {PYTHON} -c '{TELL}'"
    pipe = subprocess.PIPE
    with subprocess.Popen(["bash", "-c", script], stdin=pipe, stdout=pipe, text=True) as process:
        began = time.time()
        while time.time() - began < 0.2:  # until then it is still a script
            time.sleep(0.01)
        told, _ = process.communicate("go\n")
    assert before - 0.02 <= float(told) <= began + 0.02  # hundredths of a second


@pytest.mark.parametrize("stat", ["", "1 (a b) S 1", "1 (a) S " + "x " * 40])
def test_a_system_that_does_not_say(tmp_path: Path, stat: str) -> None:
    assert process_began(tmp_path) is None
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "stat").write_text(stat)
    assert process_began(tmp_path) is None
