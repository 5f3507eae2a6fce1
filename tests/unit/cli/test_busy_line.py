"""What a command shows at a terminal while it is at work, and what it leaves of that."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

import pytest
from harness import wait_until
from terminal import ENTER, Terminal

from kempner.cli.progress import busy

WORK = """
import sys
from kempner.cli.progress import busy
with busy("reading {all} [of it]"):
    print("inside", flush=True)
    sys.stdin.readline()
print("after")
"""
HIDE_CURSOR = b"\x1b[?25l"


def test_a_line_moves_on_the_terminal_and_is_no_part_of_the_output(tmp_path: Path) -> None:
    command = f"{sys.executable} -c {shlex.quote(WORK)} >out"
    here = Terminal.open(command, tmp_path)
    try:
        told = b"reading {all} [of it]"
        wait_until(lambda: here.look().count(told) > 2, "a line that is drawn again")
        here.type(ENTER)
        wait_until(lambda: here.shell.poll() is not None, "the end")
        assert here.shell.returncode == 0
        assert (tmp_path / "out").read_text() == "inside\nafter\n"
        assert HIDE_CURSOR not in here.look()
    finally:
        here.end()


def test_nothing_is_shown_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    with busy("reading"):
        pass
    assert capfd.readouterr() == ("", "")
