"""What a rank prints, read on its way: it is shown and kept in a file, and the step in it goes into
the rank's heartbeat file."""

from __future__ import annotations

import fcntl
import mmap
import os
import re
import select
import signal
import termios
import time
import tty
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
"""Seconds between two versions of the heartbeat file: a program may print thousands of lines in
one."""

DRAINED_WITHIN = 2.0
"""Seconds for what a rank printed last. A process that the rank has left behind may hold the
pipe."""

_CHUNK, _ROOM = 120 << 10, 1 << 20
"""Bytes that are read at once, and that a pipe has room for. Beyond 128 KiB malloc(3) maps fresh
pages for each block, whose faults cost more than the reading."""

_RECENT = 65536
"""Bytes of what a rank has printed last that may say why it has died."""

_LONGEST = 4096
"""Bytes of a line that are looked at."""

SENT_TO_ALL = (*STOP_SIGNALS, signal.SIGQUIT)
"""Signals that a terminal or Slurm sends to the supervisor and its children at once: a reader of
output ignores them."""


class StepFinder:
    """Finds the newest step in output that comes in pieces."""

    def __init__(self, pattern: str) -> None:
        self._pattern, self._rest = re.compile(pattern), b""
        self.step: int | None = None

    def feed(self, chunk: bytes) -> None:
        """The next piece. A carriage return ends a line, too: progress bars print no other end."""
        *lines, rest = (self._rest + chunk).replace(b"\r", b"\n").split(b"\n")
        self._rest = rest[:_LONGEST]
        for line in reversed(lines):
            if (step := self._step_in(line[:_LONGEST])) is not None:
                self.step = step
                break

    def _step_in(self, line: bytes) -> int | None:
        step = None
        for found in self._pattern.finditer(line.decode(errors="replace")):
            with suppress(ValueError):  # no number, or a group that took no part
                step = max(0, int((found[1] or "").replace(",", "")))
        return step


@dataclass(frozen=True)
class ChildRank:
    """A rank to start: its environment, the file for its output and the CPUs that it may use
    (none: all of this process's). With `shown` its output goes to this process's, too."""

    rank: int
    environ: Mapping[str, str]
    output: Path
    cpus: tuple[int, ...] = ()
    shown: bool = False


@dataclass(frozen=True)
class OutputEnds:
    """Both ends of a pipe, and the descriptor of this process by which what comes is `shown`."""

    reading: int
    writing: int
    shown: int | None
    is_terminal: bool = False

    @classmethod
    def open(cls, shown: int | None) -> Self:
        """A terminal where it is shown on one: the rank may have a progress bar."""
        if shown is None or not os.isatty(shown):
            reading, writing = os.pipe()
            with suppress(OSError):  # so much the rank can still print if this process has died
                fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, _ROOM)
            return cls(reading, writing, shown)
        reading, writing = os.openpty()
        tty.setraw(writing)
        ends = cls(reading, writing, shown, is_terminal=True)
        ends.fit()
        return ends

    def fit(self) -> None:
        """As many rows and columns as the terminal has that it is shown on."""
        if self.shown is not None:
            with suppress(OSError):  # it is no terminal, or has gone
                size = fcntl.ioctl(self.shown, termios.TIOCGWINSZ, bytes(8))
                fcntl.ioctl(self.reading, termios.TIOCSWINSZ, size)

    def read(self) -> bytes:
        """What has come; nothing once all that could write have closed their end."""
        try:
            return os.read(self.reading, _CHUNK)
        except OSError:  # of a terminal that is how it ends
            return b""


class RankOutput:
    """Pipes for all that a rank prints. It goes into a file, and is shown by this process where
    the rank is to be `shown`.

    A process of its own reads them: when this process dies, or is stuck, what the rank prints as
    it saves is shown and kept all the same, and never holds it up. The rank holds the reading ends,
    too, so that no death of a reader ends it.
    """

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
        """What the rank is to print to, and where its errors go."""
        return self._ends[0].writing, self._ends[-1].writing

    @property
    def reading(self) -> tuple[int, ...]:
        """What it holds besides."""
        return tuple(ends.reading for ends in self._ends)

    @contextmanager
    def pipe(self) -> Iterator[None]:
        """In this block the rank is started; what it does not need any more is closed."""
        try:
            yield
        finally:
            for ends in self._ends:
                os.close(ends.writing)
                os.close(ends.reading)

    def begin(self) -> None:
        """Have the pipes read, from before the rank is started. Raises `OSError` where no process
        can be made."""
        self._over, over = os.pipe()
        try:
            self._reader = os.fork()  # what another thread holds is not needed there
        except OSError:
            os.close(self._over)
            os.close(over)
            raise
        if self._reader == 0:
            self._read(over)
        os.close(over)

    def end(self) -> str:
        """The rank has ended: wait for its last words. The end of what it has printed, masked."""
        if self._reader is None:
            return ""
        waiting = select.poll()
        waiting.register(self._over, select.POLLIN)
        gone = waiting.poll(1000 * DRAINED_WITHIN)
        os.close(self._over)
        if gone:
            os.waitpid(self._reader, 0)
        else:  # what the rank has left behind may print for hours
            start_thread("output", partial(_reap, self._reader))
        return self._masked(self._recent.read()).decode(errors="replace")

    def _read(self, over: int) -> NoReturn:
        """What the process does."""
        try:
            _keep_only({0, 1, 2, over, *self.reading})
            self._pass_on()
            settle_all(DRAINED_WITHIN)
        finally:
            os._exit(0)

    def _pass_on(self) -> None:
        kept = KeptOutput(self._file, warn, self._masked)
        open_ends, told, at = {ends.reading: ends for ends in self._ends}, None, 0.0
        waiting = select.poll()
        for number in open_ends:
            waiting.register(number, select.POLLIN)
        while open_ends:
            for number, _ in waiting.poll(WRITE_EVERY * 1000):
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
            if step is not None and step != told and (not open_ends or now - at >= WRITE_EVERY):
                told, at = step, now
                with suppress(OSError):  # the next step is told again
                    write(self._heartbeat, Heartbeat(step))
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
    """The last bytes of an output, in memory that a forked process shares."""

    def __init__(self) -> None:
        self._memory = mmap.mmap(-1, _RECENT + 8)  # a ring, and how much has been added to it

    def add(self, chunk: bytes) -> None:
        """The next bytes."""
        total, last = self._total() + len(chunk), memoryview(chunk)[-_RECENT:]
        at = (total - len(last)) % _RECENT
        before_end = min(len(last), _RECENT - at)
        self._memory[at : at + before_end] = last[:before_end]
        self._memory[: len(last) - before_end] = last[before_end:]
        self._memory[_RECENT:] = total.to_bytes(8, "little")

    def read(self) -> bytes:
        """The last that were added."""
        if (total := self._total()) <= _RECENT:
            return self._memory[:total]
        at = total % _RECENT
        return self._memory[at:_RECENT] + self._memory[:at]

    def _total(self) -> int:
        return int.from_bytes(self._memory[_RECENT:], "little")


def _keep_only(descriptors: Collection[int]) -> None:
    """In a forked process: let go of all others, and leave every signal to the parent."""
    signal.set_wakeup_fd(-1)
    for number in SENT_TO_ALL:
        signal.signal(number, signal.SIG_IGN)
    for link in Path("/proc/self/fd").iterdir():
        if int(link.name) not in descriptors:
            with suppress(OSError):  # the one by which they are listed
                os.close(int(link.name))


def _reap(process: int) -> None:
    os.waitpid(process, 0)
