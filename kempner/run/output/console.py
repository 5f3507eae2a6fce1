"""Standard output and error of this process, so that printing never fails and never blocks.

A terminal may be closed, or stopped with Ctrl-S; a pipe may have lost its reader, or have one that
does not read; a file may lie on a full disk. None of that is worth a step of training. Lines that
cannot be shown are counted, and the count is shown as soon as output works again.

Imports only the standard library and `writers`: `protect` runs before all else.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import shutil
import stat
import sys
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO

from kempner.run.output.writers import Writer, settle_all

KEPT, KEPT_FOR_FILE = 1 << 20, 16 << 20
"""Bytes kept for an output that blocks, and for one that is a file; beyond them, lines are dropped
and counted. A terminal or a pipe may be too slow to take more at the end."""

LAST_WORDS = 2.0
"""Seconds that a process waits at its end until its output is written."""


@dataclass(frozen=True)
class _Chunk:
    """Bytes for a descriptor; before them, `lost_before` lines were dropped."""

    descriptor: int
    data: bytes
    lost_before: int


class _Outlet(Writer[_Chunk]):
    """A file, terminal or pipe that is standard output, standard error, or both."""

    _dropped: int
    _lost: int

    def __init__(self, kept: int) -> None:
        self.puts, self._torn = 0, False
        super().__init__("output", kept)

    def show(self, descriptor: int, data: bytes, wait: bool = True) -> None:
        """Write as soon as possible; as a rule this returns when the data is written, or, without
        `wait`, when fewer than half of the bytes wait that are kept."""
        self.puts += 1
        if sys.is_finalizing():  # no threads any more: a blocked write is dropped
            if _takes_some(descriptor):
                self._show(_Chunk(descriptor, data, self._dropped))
            return
        with self._changed:
            before, self._dropped = self._dropped, 0
            ahead = 0 if wait else self._kept // 2
            self.prompt(_Chunk(descriptor, data, before), len(data), ahead)

    def _drop(self, item: _Chunk) -> None:
        # `show` has moved the lines dropped before into `lost_before`.
        self._dropped = item.lost_before + item.data.count(b"\n")

    def _start_anew(self) -> None:
        super()._start_anew()
        self._dropped = self._lost = 0

    def _write(self) -> None:
        while self._waiting:
            self._show(self._waiting[0][0])
            self._taken += self._waiting.popleft()[1]

    def _show(self, chunk: _Chunk) -> None:
        self._lost += chunk.lost_before
        head = f"kempner: lines that could not be shown here: {self._lost}\n" if self._lost else ""
        if head and self._torn:
            head = "\n" + head
        data, written = head.encode() + chunk.data if head else chunk.data, 0
        try:
            while written < len(data):
                written += _write_some(chunk.descriptor, memoryview(data)[written:])
        except OSError:
            unseen = chunk.data[max(0, written - len(head)) :].count(b"\n")
            self._lost = unseen + (self._lost if written < len(head) else 0)
        else:
            self._lost = 0
        if written:
            self._torn = data[written - 1 : written] != b"\n"


def _takes_some(descriptor: int) -> bool:
    """Whether a write would not wait for a reader."""
    waiting = select.poll()
    waiting.register(descriptor, select.POLLOUT)
    return bool(waiting.poll(0))


def _write_some(descriptor: int, data: memoryview) -> int:
    """Write what fits, and wait for the reader as long as that takes. Raises `OSError`."""
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:  # another process that shares the terminal has set O_NONBLOCK
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()


_outlets: dict[tuple[int, int], _Outlet] = {}
_outlets_lock = threading.RLock()


def _outlet(descriptor: int) -> _Outlet:
    """The outlet of a descriptor's file; output and error often share one."""
    try:
        found = os.fstat(descriptor)
        key, is_file = (found.st_dev, found.st_ino), stat.S_ISREG(found.st_mode)
    except OSError:
        key, is_file = (-1, descriptor), False
    with _outlets_lock:
        if key not in _outlets:
            _outlets[key] = _Outlet(KEPT_FOR_FILE if is_file else KEPT)
        return _outlets[key]


def _renew_lock() -> None:
    global _outlets_lock
    _outlets_lock = threading.RLock()


os.register_at_fork(after_in_child=_renew_lock)


class _Raw(io.RawIOBase):
    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor, self.name = descriptor, name

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def write(self, data: Any) -> int:
        content = bytes(data)
        _outlet(self._descriptor).show(self._descriptor, content)
        return len(content)


def protect(names: Collection[str] = ("stdout", "stderr")) -> None:
    """Make writes to `sys.stdout` and `sys.stderr` never fail or block from now on. A stream that
    the program has put in their place stays. Safe to call again."""
    for name in names:
        stream, first = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is None:  # closed before this process began; no file must get its number
            setattr(sys, name, _open_stream(_open_nothing(name), name, None))
        elif stream is first and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _open_stream(stream.fileno(), name, stream))
            _kept.append(stream)
            with suppress(OSError):
                stream.flush()
            atexit.register(_flush)  # before the threads end


def say(text: str, stream: TextIO | None = None) -> None:
    try:
        # In one write: a rank's line may be shown between two.
        print(f"{_line.before}{text}\n", end="", file=stream or sys.stdout, flush=True)
        if _line.after:
            print(_line.after, end="", flush=True)
    except (OSError, ValueError):  # a stream that is closed, or whose reader is gone
        _count_unsaid(text)


@dataclass(frozen=True)
class _LastLine:
    """What to print before and after a line while the terminal's last line is in use."""

    before: str = ""
    after: str = ""


_ERASE = "\r\x1b[2K"


def pass_on(descriptor: int, data: bytes) -> None:
    """Show another process's output on this process's `descriptor`, without waiting for each write,
    which would cost a thread switch. Never raises."""
    _outlet(descriptor).show(descriptor, data, wait=False)


def can_rewrite() -> bool:
    """Whether standard output is a terminal on which a line can be rewritten."""
    return sys.stdout.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


def show_for_now(text: str) -> None:
    """Show a line that the next one replaces; a plain line where nothing can be replaced."""
    global _line
    if not can_rewrite():
        say(text)
        return
    columns = shutil.get_terminal_size().columns
    shown = text[: max(1, columns - 1)]
    with suppress(OSError, ValueError):
        print(f"{_ERASE}{shown}", end="", flush=True)
    _line = _LastLine(_ERASE, shown)


class WholeLine:
    """A line that this process has printed, and can rewrite until something else is printed."""

    def __init__(self, text: str) -> None:
        say(text)
        self._puts = _puts()

    def say_anew(self, text: str) -> bool:
        """Rewrite the line; False, without output, if it is no longer this process's last line."""
        if _puts() != self._puts:
            return False
        say(f"\x1b[1A{_ERASE}{text}")
        self._puts = _puts()
        return True


def _puts() -> int:
    return sum(outlet.puts for outlet in _outlets.values())


def expect_a_line_for_now() -> None:
    """Expect that the parent process may show a `show_for_now` line: the next line replaces it."""
    global _line
    if can_rewrite():
        _line = _LastLine(_ERASE)


def erase_line() -> None:
    """Erase the last line; it is this process's again."""
    global _line
    if _line != _LastLine():
        _line = _LastLine()
        with suppress(OSError, ValueError):
            print(_ERASE, end="", flush=True)


def leave_line_to_others(theirs: bool) -> None:
    """Set whether the last line is another process's (`theirs`): if so, `say` begins a new line."""
    global _line
    _line = _LastLine("\n" if theirs and can_rewrite() else "")


def lost_lines() -> int:
    """Lines that could not be shown, and whose number was not shown yet."""
    return _unsaid + sum(outlet._lost + outlet._dropped for outlet in _outlets.values())


def at_the_end(tell: Callable[[], None]) -> None:
    """Call `tell` when this process is about to `leave`: it may still print."""
    _farewells[tell.__qualname__] = tell


def leave(code: int) -> NoReturn:
    """End this process with `code` now, whatever signal arrives meanwhile. The interpreter is not
    finalized: that would restore the signals' default actions, and wait for threads that may be
    stuck. Output that is not written yet gets `LAST_WORDS` seconds."""
    _flush()
    for tell in _farewells.values():
        tell()
    settle_all(LAST_WORDS / 2)
    os._exit(code)


def _flush() -> None:
    """Write what the program has printed, and what else is left, within `LAST_WORDS` seconds."""
    _Flush("flush").prompt()
    settle_all(LAST_WORDS)


class _Flush(Writer[None]):
    def _write(self) -> None:
        for stream in (sys.stdout, sys.stderr, *_kept):  # the program may have replaced some
            with suppress(OSError, ValueError, AttributeError):
                stream.flush()


def _open_stream(descriptor: int, name: str, like: io.TextIOWrapper | None) -> io.TextIOWrapper:
    raw = _Raw(descriptor, f"<{name}>")
    at_once = like is not None and like.write_through  # as with python -u
    return io.TextIOWrapper(
        raw if at_once else io.BufferedWriter(raw),
        encoding="utf-8" if like is None else like.encoding,
        errors="backslashreplace",
        line_buffering=like is None or like.line_buffering,
        write_through=at_once,
    )


def _open_nothing(name: str) -> int:
    """A descriptor that takes everything, with the number that belongs to `name` if it is free."""
    opened, wanted = os.open(os.devnull, os.O_WRONLY), {"stdout": 1, "stderr": 2}[name]
    try:
        os.fstat(wanted)
    except OSError:
        os.dup2(opened, wanted)
    os.set_inheritable(wanted, True)
    return wanted if opened == wanted else opened


def _count_unsaid(text: str) -> None:
    global _unsaid
    _unsaid += text.count("\n") + 1


_line = _LastLine()
_unsaid = 0
_kept: list[io.TextIOWrapper] = []
"""The streams that were replaced: their descriptors close with them."""
_farewells: dict[str, Callable[[], None]] = {}
