"""A network that is cut for some seconds: no rank is given up that comes back."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from patience import scaled

PROGRAM = Path(__file__).with_name("cut_off.py")


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None, reason="a network of its own needs root, tc"
)
def test_no_rank_is_given_up_that_is_cut_off_for_some_seconds(tmp_path: Path) -> None:
    """Nor by one for which nothing is heard: a switch that starts anew takes half a minute."""
    cuts = {}
    for seconds in (1, 15, 45):
        folder = tmp_path / str(seconds)
        folder.mkdir()
        command = ["unshare", "--net", sys.executable, PROGRAM, str(seconds), folder]
        cuts[seconds] = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    for seconds, process in cuts.items():
        said, _ = process.communicate(timeout=scaled(120))
        assert process.returncode == 0, f"cut of {seconds} s\n{said}"
        assert said.endswith("no rank was given up\n")
