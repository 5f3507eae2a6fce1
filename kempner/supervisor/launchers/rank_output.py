"""Reads a rank's output from pipes: shows it, keeps it in a file, and writes the step found in it
to the rank's heartbeat file."""

from __future__ import annotations

import fcntl
import math
import mmap
import os
import re
import select
import signal
import termios
import time
import tty
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NoReturn, Self

from kempner.run.control.heartbeat_file import Heartbeat, path_in, write
from kempner.run.output.console import pass_on
from kempner.run.output.logs import masking, warn
from kempner.run.output.writers import KeptOutput, settle_all
from kempner.run.process.signals import STOP_SIGNALS
from kempner.run.process.threads import start_thread

WRITE_EVERY = 1.0
"""Seconds between two writes of the heartbeat file: a program may print thousands of lines a
second."""

DRAINED_WITHIN = 2.0
"""Seconds to read the last output of a rank that has ended: a process that it left behind may hold
the pipe open."""

_CHUNK, _ROOM = 120 << 10, 1 << 20
"""Bytes per read, and capacity of a pipe. Beyond 128 KiB malloc(3) maps fresh pages for each block,
whose page faults cost more than the read."""

_RECENT = 65536
"""Bytes of a rank's last output that are searched for the cause of its death."""

_SHARED_WITHIN = 0.05
"""Seconds after which the last output is in shared memory, where not every byte is copied."""

_LONGEST = 4096
"""Bytes of a line that are searched."""

SENT_TO_ALL = (*STOP_SIGNALS, signal.SIGQUIT)
"""Signals that a terminal or Slurm sends to the supervisor and its children at once; output readers
ignore them."""


class StepFinder:
    """Finds the newest step in output that comes in pieces."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._rest = re.compile(pattern), b""
        self.step: int | None = None

    def feed(self, chunk: bytes) -> None:
        """Search the next piece. A carriage return ends a line, too: progress bars print no other
        end."""
        *lines, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[:_LONGEST]
        for line in reversed(lines):
            if (step := self._step_in(line[:_LONGEST])) is not None:
                self.step = step
                break

    def _step_in(self, line: bytes) -> int | None:
        step = None
        for found in self._pattern.finditer(line.decode(errors="replace")):
            with suppress(ValueError):  # not a number, or an unmatched group
                step = max(0, int((found[1] or "").replace(",", "")))
        return step


@dataclass(frozen=True)
class ChildRank:
    """A rank to start: its environment, the file for its output, and its CPUs (empty: those of this
    process). With `shown` its output is also printed by this process."""

    rank: int
    environ: Mapping[str, str]
    output: Path
    cpus: tuple[int, ...] = ()
    shown: bool = False


@dataclass(frozen=True)
class OutputEnds:
    """Both ends of a pipe, and this process's descriptor on which its data is `shown`, if any."""

    reading: int
    writing: int
    shown: int | None
    is_terminal: bool = False

    @classmethod
    def open(cls, shown: int | None) -> Self:
        """Open a pipe, or a pseudo-terminal if the output is shown on a terminal: the rank may have
        a progress bar."""
        if shown is None or not os.isatty(shown):
            reading, writing = os.pipe()
            with suppress(OSError):  # room for what the rank prints after this process has died
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
            return cls(reading, writing, shown)
        reading, writing = os.openpty()
        tty.setraw(writing)
        ends = cls(reading, writing, shown, is_terminal=True)
        ends.fit()
        return ends

    def fit(self) -> None:
        """Give the pseudo-terminal the size of the terminal on which it is shown."""
        if self.shown is not None:
            with suppress(OSError):  # not a terminal, or closed
                size = fcntl.ioctl(self.shown, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.reading, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        """The next bytes; none once all writers have closed their end."""
        try:
            return os.read(self.reading, _CHUNK)
        except OSError:  # the end of a pseudo-terminal
            return b""


class RankOutput:
    """Pipes for a rank's output, which goes into a file and, if the rank is `shown`, to this
    process's output.

    A forked process reads them: if this process dies or is stuck, output of the rank's final save
    is still kept, and never blocks it. The rank holds the reading ends, too, so that it gets no
    SIGPIPE if the reader dies."""

    def __init__(self, child: ChildRank, pattern: str) -> None:
        heartbeat = path_in(child.environ) if pattern else None
        self._lines = None if heartbeat is None else StepFinder(pattern)
        self._heartbeat, self._file, self._masked = heartbeat, child.output, masking(child.environ)
        both = (1,) if not child.shown or os.path.sameopenfile(1, 2) else (1, 2)
        self._ends = [OutputEnds.open(number if child.shown else None) for number in both]
        self._recent = RecentBytes()
        self._reader: int | None = None
        self._over = -1

    @property
    def writing(self) -> tuple[int, int]:
        """The descriptors of the rank's standard output and error."""
        return self._ends[0].writing, self._ends[-1].writing

    @property
    def reading(self) -> tuple[int, ...]:
        """The reading ends, which the rank holds as well."""
        return tuple(ends.reading for ends in self._ends)

    @contextmanager
    def pipe(self) -> Iterator[None]:
        """Start the rank in this block; afterwards this process's ends are closed."""
        try:
            yield
        finally:
            for ends in self._ends:
                os.close(ends.writing)
                os.close(ends.reading)

    def begin(self) -> None:
        """Start the reader, before the rank. Raises `OSError` if it cannot be forked."""
        self._over, over = os.pipe()
        try:
            self._reader = os.fork()  # safe: the reader needs no lock that another thread may hold
        except OSError:
            os.close(self._over)
            os.close(over)
            raise
        if self._reader == 0:
            self._read(over)
        os.close(over)

    def end(self) -> str:
        """After the rank's end: wait for its last output; the end of its output, masked."""
        if self._reader is None:
            return ""
        waiting = select.poll()
        waiting.register(self._over, select.POLLIN)
        drained = waiting.poll(1000 * DRAINED_WITHIN)
        os.close(self._over)
        if drained:
            os.waitpid(self._reader, 0)
        else:  # a process that the rank left behind may print for hours
            start_thread("output", partial(_reap, self._reader))
        return self._masked(self._recent.read()).decode(errors="replace")

    def _read(self, over: int) -> NoReturn:
        """The reader process."""
        try:
            _keep_only({0, 1, 2, over, *self.reading})
            self._pass_on()
            settle_all(DRAINED_WITHIN)
        finally:
            os._exit(0)

    def _pass_on(self) -> None:
        kept = KeptOutput(self._file, warn, self._masked)
        open_ends, written, at = {ends.reading: ends for ends in self._ends}, None, 0.0
        waiting = select.poll()
        for number in open_ends:
            waiting.register(number, select.POLLIN)
        while open_ends:
            for number, _ in waiting.poll(1000 * min(WRITE_EVERY, self._recent.share())):
                if chunk := open_ends[number].read():
                    self._take_in(chunk, open_ends[number], kept)
                else:
                    waiting.unregister(number)
                    del open_ends[number]
            if self._lines is None or self._heartbeat is None:
                continue
            if not open_ends:
                self._lines.feed(b"\n")
            step, now = self._lines.step, time.monotonic()
            if step is not None and step != written and (not open_ends or now - at >= WRITE_EVERY):
                written, at = step, now
                with suppress(OSError):  # the next step is tried again
                    write(self._heartbeat, Heartbeat(step))
        self._recent.share(at_once=True)
        kept.close()

    def _take_in(self, chunk: bytes, ends: OutputEnds, kept: KeptOutput) -> None:
        self._recent.add(chunk)
        if ends.shown is not None:
            pass_on(ends.shown, chunk)
            if ends.is_terminal:
                ends.fit()
        kept.add(chunk)
        if self._lines is not None:
            self._lines.feed(chunk)


class RecentBytes:
    """The last bytes of an output, in memory shared with a forked process."""

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 8 + _RECENT)  # the number of bytes, and the bytes
        self._chunks: deque[bytes] = deque()
        self._size, self._due_at = 0, math.inf

    def add(self, chunk: bytes) -> None:
        """Add the next bytes, which `share` publishes."""
        self._chunks.append(chunk)
        self._size += len(chunk)
        while self._size - len(self._chunks[0]) >= _RECENT:
            self._size -= len(self._chunks.popleft())
        self._due_at = min(self._due_at, time.monotonic() + _SHARED_WITHIN)

    def share(self, at_once: bool = False) -> float:
        """Publish the last bytes if that is due; the seconds until it is."""
        if (left := self._due_at - time.monotonic()) > 0 and not at_once:
            return left
        last = b"".join(self._chunks)[-_RECENT:]
        self._shared[8 : 8 + len(last)] = last
        self._shared[:8] = len(last).to_bytes(8, "little")
        self._due_at = math.inf
        return math.inf

    def read(self) -> bytes:
        return self._shared[8 : 8 + int.from_bytes(self._shared[:8], "little")]


def _keep_only(descriptors: Collection[int]) -> None:
    """In a forked process: close all other descriptors, and ignore signals."""
    signal.set_wakeup_fd(-1)
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    for link in Path("/proc/self/fd").iterdir():
        if int(link.name) not in descriptors:
            with suppress(OSError):  # the descriptor of this listing
                os.close(int(link.name))


def _reap(process: int) -> None:
    os.waitpid(process, 0)
