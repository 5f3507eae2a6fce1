"""Printing and logging where the output takes nothing, takes it late, or is gone."""

from __future__ import annotations

import fcntl
import io
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import wait_until
from patience import scaled

from kempner.run.output import console, logs, writers
from kempner.run.output.console import lost_lines, protect, say
from kempner.run.output.logs import logger, open_log
from kempner.run.output.writers import settle_all

CAPACITY = 4096
"""Bytes that the pipe of these tests takes."""


@dataclass
class Pipe:
    """Where standard output leads to, in the hands of a test."""

    path: Path
    reader: int
    stream: io.TextIOWrapper

    def take_all(self, last: str) -> str:
        """Read until `last` has come."""
        taken = bytearray()

        def look() -> bool:
            with suppress(BlockingIOError):
                taken.extend(os.read(self.reader, 1 << 20))
            return last.encode() in taken

        wait_until(look, last)
        return taken.decode()

    def close(self) -> None:
        """The pipe has no reader any more."""
        os.close(self.reader)

    def open_again(self) -> None:
        self.reader = os.open(self.path, os.O_RDONLY | os.O_NONBLOCK)


@pytest.fixture
def pipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    monkeypatch.setattr(writers, "PATIENCE", 0.05)
    monkeypatch.setattr(console, "_outlets", {})  # what other tests have lost does not count here
    monkeypatch.setattr(console, "_unsaid", 0)
    path = tmp_path / "pipe"
    os.mkfifo(path)
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    writer = os.open(path, os.O_WRONLY)
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, CAPACITY)
    with io.TextIOWrapper(io.FileIO(writer, "w"), "utf-8", line_buffering=True) as plain:
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdout", plain)
            patch.setattr(sys, "__stdout__", plain)
            protect(["stdout"])
            assert isinstance(sys.stdout, io.TextIOWrapper)
            assert sys.stdout is not plain
            pipe = Pipe(path, reader, sys.stdout)
        yield pipe
        pipe.close()
        settle_all(10)


def test_what_a_reader_does_not_take_comes_later_in_order_and_the_rest_is_counted(
    pipe: Pipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "KEPT", 2 * CAPACITY)
    for number in range(4000):
        print("line", number, file=pipe.stream)
    lost = lost_lines()
    assert 0 < lost < 4000
    shown = pipe.take_all(last=f"line {3999 - lost}\n")
    assert re.findall(r"line (\d+)\n", shown) == [str(n) for n in range(4000 - lost)]
    say("äöü \ud800", pipe.stream)
    assert (
        pipe.take_all("d800")
        == f"kempner: lines that could not be shown here: {lost}\näöü \\ud800\n"
    )
    assert lost_lines() == 0


def test_what_nobody_reads_is_counted_and_told_to_the_next_reader(pipe: Pipe) -> None:
    print("seen", file=pipe.stream)
    assert pipe.take_all("seen\n") == "seen\n"
    pipe.close()
    print("not seen", file=pipe.stream)
    print("neither", end="", file=pipe.stream)
    print(" this", file=pipe.stream)
    assert lost_lines() == 2
    pipe.open_again()
    print("seen again", file=pipe.stream)
    assert (
        pipe.take_all("again\n") == "kempner: lines that could not be shown here: 2\nseen again\n"
    )


def test_logging_without_a_terminal_tells_the_log_how_much_was_lost(
    pipe: Pipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logs, "_sink", logs._Sink())
    monkeypatch.setattr(sys, "stderr", pipe.stream)
    open_log(tmp_path / "attempt" / "log.jsonl", attempt=3)
    pipe.close()
    logger().warning("a warning")
    logs._tell_what_was_not_shown()
    lines = (tmp_path / "attempt" / "log.jsonl").read_text()
    assert re.findall(r'"event": "([^"]+)"', lines) == ["a warning", "output could not be shown"]
    assert '"lines": 1' in lines
    pipe.open_again()
    say("there again", pipe.stream)
    assert "could not be shown here: 2\n" in pipe.take_all("there again")


def test_a_stream_that_is_not_ours_is_left_alone_and_cannot_fail(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed = io.StringIO()
    monkeypatch.setattr(sys, "stdout", closed)
    protect(["stdout"])
    assert sys.stdout is closed
    closed.close()
    before = lost_lines()
    say("two\nlines")
    assert lost_lines() == before + 2


def test_a_forked_child_does_not_write_what_waits_in_its_parent(pipe: Pipe) -> None:
    for number in range(1000):
        print("line", number, file=pipe.stream)
    before = lost_lines()
    if (child := os.fork()) == 0:
        settle_all(0.0)
        os._exit(lost_lines() != before)
    assert os.waitpid(child, 0)[1] == 0
    shown = pipe.take_all("line 999\n")
    assert re.findall(r"line (\d+)\n", shown) == [str(n) for n in range(1000)]


UNTIL_THE_END = """
import sys
from kempner.run.output.console import protect
protect()
class Late:
    def __del__(self, print=print, err=sys.stderr):
        print("the end", file=err)
late = Late()
sys.stdout.write("not flushed")
"""


@pytest.mark.parametrize(
    ("closed", "shown"), [("", "not flushedthe end\n"), ("2>&-", "not flushed")]
)
def test_the_end_of_the_interpreter_waits_for_no_thread(closed: str, shown: str) -> None:
    shell = f'exec 2>&1 {closed}; exec "$0" -c "$1"'
    done = subprocess.run(
        ["bash", "-c", shell, sys.executable, UNTIL_THE_END],
        stdout=subprocess.PIPE,
        text=True,
        timeout=scaled(60),
        check=True,
    )
    assert done.stdout == shown


SAYS_ANEW = """
from kempner.run.output.console import WholeLine, protect, say
protect()
line = WholeLine("one")
print(line.say_anew("two"), line.say_anew("three"), sep=" ", end=".\\n")
print(line.say_anew("four"), end=".\\n")
"""


def test_a_line_is_said_anew_until_something_else_is_said() -> None:
    command = [sys.executable, "-c", SAYS_ANEW]
    done = subprocess.run(command, capture_output=True, timeout=scaled(60), check=True)
    anew = "\x1b[1A\r\x1b[2K"
    assert done.stdout.decode() == f"one\n{anew}two\n{anew}three\nTrue True.\nFalse.\n"
