"""What a rank prints, read on its way: the step in it goes into the rank's heartbeat file."""

from __future__ import annotations

import os
import re
import select
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from kempner.run.control.program.heartbeat_file import Heartbeat, write
from kempner.run.process.threads import start_thread

WRITE_EVERY = 1.0
"""Seconds between two versions of the file: a program may print thousands of lines in one."""

DRAINED_WITHIN = 2.0
"""Seconds for what a rank printed last. A process that it has left behind may hold the pipe."""

_CHUNK = 65536
_LONGEST = 4096
"""Bytes of a line that are looked at."""


class StepFinder:
    """Finds the newest step in output that comes in pieces."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._rest = re.compile(pattern), b""
        self.step: int | None = None

    def feed(self, chunk: bytes) -> None:
        """The next piece. A carriage return ends a line, too: progress bars print no other end."""
        *lines, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        for line in lines:
            self._look(line[:_LONGEST])
        self._rest = rest[:_LONGEST]

    def _look(self, line: bytes) -> None:
        for found in self._pattern.finditer(line.decode(errors="replace")):
            with suppress(ValueError):  # no number, or a group that took no part
                self.step = max(0, int((found[1] or "").replace(",", "")))


class RankOutput:
    """A pipe for all that a rank prints, which goes on to `target`, a file descriptor.

    The rank holds the reading end, too: if this process dies before it, what it prints as it saves
    does not end it.
    """

    def __init__(self, pattern: str, target: int, heartbeat: Path) -> None:
        self._lines, self._target, self._heartbeat = StepFinder(pattern), target, heartbeat
        self.reading, self.writing = os.pipe()
        self._thread: threading.Thread | None = None

    @contextmanager
    def pipe(self) -> Iterator[None]:
        """In this block the rank is started; what it does not need any more is closed."""
        try:
            yield
        finally:
            os.close(self.writing)
            if self._thread is None:
                self._close()

    def begin(self) -> None:
        """The rank has the pipe: read it from now on."""
        self._thread = start_thread("output", self._pass_on)

    def end(self) -> None:
        """The rank has ended: wait for its last words."""
        if self._thread is not None:
            self._thread.join(DRAINED_WITHIN)

    def _pass_on(self) -> None:
        written, at = self._lines.step, 0.0
        over = False
        while not over:
            ready, _, _ = select.select([self.reading], [], [], WRITE_EVERY)
            if ready:
                chunk = os.read(self.reading, _CHUNK)
                over = not chunk
                _copy(chunk, self._target)
                self._lines.feed(chunk or b"\n")
            step, now = self._lines.step, time.monotonic()
            if step is not None and step != written and (over or now - at >= WRITE_EVERY):
                written, at = step, now
                with suppress(OSError):  # the next step is told again
                    write(self._heartbeat, Heartbeat(step))
        self._close()

    def _close(self) -> None:
        os.close(self.reading)
        if self._target > 2:  # a descriptor of its own
            os.close(self._target)


def _copy(chunk: bytes, target: int) -> None:
    left = memoryview(chunk)
    while left:
        try:
            left = left[os.write(target, left) :]
        except OSError:
            return  # the disk is full, or the reader is gone: the rank goes on
