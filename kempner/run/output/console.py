"""Standard output and error of this process, made so that printing never fails and never blocks.

A terminal may be closed, or stopped with Ctrl-S; a pipe may have lost its reader, or have one that
does not read; a file may lie on a full disk. None of that is worth a step of training. What cannot
be shown is counted, and the count is shown as soon as something can be.

Nothing beyond the standard library is imported here: this is armed before anything else.

Makes calls that may block for ever, such as writes to a terminal or to storage that hangs.

They are made on a thread of their own, one after the other. The caller waits until its call was
made, so that what it wrote is there when that returns; but never for longer than `PATIENCE`, and
while an earlier call is stuck not at all.

Nothing beyond the standard library is imported here: this is needed before anything else.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import select
import shutil
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn, TextIO, TypeAlias

PATIENCE = 0.5
"""Seconds that a caller waits for a call that does not return; once, until one returns again."""

IDLE = 5.0
"""Seconds after which a thread ends that has nothing to do; the next errand starts another."""


class Errand:
    """Something to do that may block: `run` returns the seconds after which to try it again.

    None where nothing is left to do. It must not raise what can be expected, such as `OSError`.
    """

    def __init__(self, run: Callable[[], float | None]) -> None:
        self.run = run
        self.asked = self.done = 0
        self.due_at = math.inf


Tickets: TypeAlias = list[tuple[Errand, int]]
"""Errands, each with how often it has to be done until it counts."""


class Courier:
    """A thread that runs errands. Methods may be called from any thread; none raises."""

    _stuck: bool

    def __init__(self, name: str) -> None:
        self._name = name
        self._start_anew()
        _couriers.add(self)

    def prompt(self, errand: Errand) -> None:
        """Have `errand` run now, and wait for that as long as this thread has patience."""
        if sys.is_finalizing():  # no other thread runs any more, and one may have held the lock
            errand.run()
            return
        with self._changed:
            ticket = self._ask_for(errand)
            if not self._has_thread():
                errand.run()  # no thread is to be had: rather wait than keep silent
            elif not (self._stuck or threading.current_thread() is self._thread):
                self._stuck = not self._changed.wait_for(lambda: errand.done >= ticket, PATIENCE)

    def settle(self, seconds: float) -> bool:
        """Have whatever is left tried once more; whether that was done within `seconds`.

        Not to be called once the interpreter is torn down.
        """
        return self.wait_for(self.ask_again(), seconds)

    def ask_again(self) -> Tickets:
        """Have whatever is left tried once more, from now on; what to wait for."""
        with self._changed:
            left = [*self._due, *([] if self._running is None else [self._running])]
            return [(errand, self._ask_for(errand)) for errand in left]

    def wait_for(self, tickets: Tickets, seconds: float) -> bool:
        """Wait until that is done; whether it was within `seconds`."""
        with self._changed:
            if not tickets or not self._has_thread():
                return not tickets
            return self._changed.wait_for(
                lambda: all(errand.done >= ticket for errand, ticket in tickets), seconds
            )

    def _start_anew(self) -> None:
        """Begin without a thread and with nothing to do, as a forked child has to."""
        self._changed = threading.Condition()
        self._due: set[Errand] = set()
        self._running: Errand | None = None
        self._stuck = False
        self._thread: threading.Thread | None = None

    def _ask_for(self, errand: Errand) -> int:
        errand.asked += 1
        errand.due_at = min(errand.due_at, time.monotonic())
        self._due.add(errand)
        self._changed.notify_all()
        return errand.asked

    def _has_thread(self) -> bool:
        """Whether a thread is there; it is started if not."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            self._running = None
            try:
                self._thread.start()
            except RuntimeError:  # out of threads, or the interpreter is about to end
                self._thread = None
        return self._thread is not None

    def _serve(self) -> None:
        while (due := self._next()) is not None:
            errand, asked = due
            again = errand.run()
            with self._changed:
                errand.done, self._running, self._stuck = asked, None, False
                if again is not None:
                    errand.due_at = min(errand.due_at, time.monotonic() + again)
                    self._due.add(errand)
                self._changed.notify_all()

    def _next(self) -> tuple[Errand, int] | None:
        """The errand that has been due for longest, once there is one, and how often it was asked
        for until now; None where there is nothing to do for a while.
        """
        with self._changed:
            while True:
                first = min(self._due, key=lambda errand: errand.due_at, default=None)
                wait = IDLE if first is None else first.due_at - time.monotonic()
                if first is not None and wait <= 0:
                    self._due.discard(first)
                    first.due_at, self._running = math.inf, first
                    return first, first.asked
                if not self._changed.wait(wait) and not self._due:
                    self._thread = None
                    return None


_couriers: weakref.WeakSet[Courier] = weakref.WeakSet()


def settle_all(seconds: float) -> None:
    """Give every courier of this process the chance to end what it has to do; `seconds` in all."""
    end = time.monotonic() + seconds
    # All at once: what one of them cannot end must not take the time of the others.
    asked = [(courier, courier.ask_again()) for courier in list(_couriers)]
    for courier, tickets in asked:
        courier.wait_for(tickets, max(0.0, end - time.monotonic()))


def _forget_couriers() -> None:
    for courier in list(_couriers):
        courier._start_anew()


os.register_at_fork(after_in_child=_forget_couriers)


KEPT = 256 * 1024
"""Bytes that wait for an output that takes none at the moment; what comes beyond is counted."""

LAST_WORDS = 2.0
"""Seconds that the end of a process waits for what is not written yet."""


@dataclass(frozen=True)
class _Chunk:
    """Bytes for a descriptor; `lost_before` lines that came before them were dropped."""

    descriptor: int
    data: bytes
    lost_before: int


class _Outlet:
    """One file, terminal or pipe that standard output or error, or both, lead to."""

    def __init__(self) -> None:
        self._waiting: deque[_Chunk] = deque()
        self._lock = threading.Lock()
        self._size = self._dropped = self._lost = self.puts = 0
        self._torn = False
        self._errand, self._courier = Errand(self._write), Courier("output")

    @property
    def lost(self) -> int:
        """Lines that could not be shown, and whose count could not be shown either."""
        return self._lost + self._dropped

    def put(self, descriptor: int, data: bytes) -> None:
        """Write as soon as that can be done; as a rule before this returns."""
        self.puts += 1
        if sys.is_finalizing():  # there are no threads any more: what would block is lost
            if _takes_some(descriptor):
                self._show(_Chunk(descriptor, data, self._dropped))
            return
        with self._lock:
            if self._size and self._size + len(data) > KEPT:
                self._dropped += data.count(b"\n")
            else:
                self._waiting.append(_Chunk(descriptor, data, self._dropped))
                self._size, self._dropped = self._size + len(data), 0
        self._courier.prompt(self._errand)

    def start_anew(self) -> None:
        """In a forked child: what waits is the parent's to write."""
        self._waiting, self._lock = deque(), threading.Lock()
        self._size = self._dropped = self._lost = 0

    def _write(self) -> None:
        while self._waiting:
            chunk = self._waiting[0]
            self._show(chunk)
            with self._lock:
                self._waiting.popleft()
                self._size -= len(chunk.data)

    def _show(self, chunk: _Chunk) -> None:
        self._lost += chunk.lost_before
        head = f"kempner: lines that could not be shown here: {self._lost}\n" if self._lost else ""
        if head and self._torn:
            head = "\n" + head
        data, written = head.encode() + chunk.data, 0
        try:
            while written < len(data):
                written += _write_some(chunk.descriptor, data[written:])
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


def _write_some(descriptor: int, data: bytes) -> int:
    """Write what fits, and wait for the reader as long as that takes. Raises `OSError`."""
    while True:
        try:
            return os.write(descriptor, data)
        except BlockingIOError:  # another process that shares the terminal has set O_NONBLOCK
            waiting = select.poll()
            waiting.register(descriptor, select.POLLOUT)
            waiting.poll()


_outlets: dict[tuple[int, int], _Outlet] = {}
_finding = threading.RLock()


def _outlet(descriptor: int) -> _Outlet:
    """Of what the descriptor leads to now: output and error often lead to the same."""
    try:
        found = os.fstat(descriptor)
        key = found.st_dev, found.st_ino
    except OSError:
        key = -1, descriptor
    with _finding:
        if key not in _outlets:
            _outlets[key] = _Outlet()
        return _outlets[key]


def _forget_all() -> None:
    global _finding
    _finding = threading.RLock()
    for outlet in _outlets.values():
        outlet.start_anew()


os.register_at_fork(after_in_child=_forget_all)


class _Raw(io.RawIOBase):
    """What a text stream writes to."""

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
        _outlet(self._descriptor).put(self._descriptor, content)
        return len(content)


def protect(names: Collection[str] = ("stdout", "stderr")) -> None:
    """Let nothing that is written to `sys.stdout` and `sys.stderr` fail or block from now on.

    One that is replaced by something else, a notebook's, say, stays as it is. Safe to call again.
    """
    for name in names:
        stream, first = getattr(sys, name), getattr(sys, f"__{name}__")
        if stream is None:  # closed before this process began; its number must not go to a file
            setattr(sys, name, _open_stream(_open_nothing(name), name, None))
        elif stream is first and isinstance(stream, io.TextIOWrapper):
            setattr(sys, name, _open_stream(stream.fileno(), name, stream))
            _kept.append(stream)
            with suppress(OSError):
                stream.flush()
            atexit.register(_flush)  # later there are no threads any more


def say(text: str, stream: TextIO | None = None) -> None:
    """Print a line, on standard output or on `stream`. Never raises."""
    try:
        print(f"{_line.before}{text}", file=stream or sys.stdout, flush=True)
        if _line.after:
            print(_line.after, end="", flush=True)
    except (OSError, ValueError):  # a stream that is closed, or whose reader is gone
        _count_unsaid(text)


@dataclass(frozen=True)
class _LastLine:
    """What to print before and after a line, as the last one of the terminal is taken."""

    before: str = ""
    after: str = ""


_ERASE = "\r\x1b[2K"


def can_rewrite(stream: TextIO | None = None) -> bool:
    """Whether standard output, or `stream`, is a terminal on which a line can be written anew."""
    there = stream or sys.stdout
    return there.isatty() and os.environ.get("TERM", "") not in ("", "dumb", "unknown")


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
    """A line that this process has said, and says anew as long as it has said nothing else.

    Unlike one of `show_for_now` it is whole: what another process prints begins below it. Only as
    long as no other has printed anything may it be said anew.
    """

    def __init__(self, text: str) -> None:
        say(text)
        self._puts = _puts()

    def say_anew(self, text: str) -> bool:
        """False, and nothing is shown, where it is no longer the last line of this process."""
        if _puts() != self._puts:
            return False
        say(f"\x1b[1A{_ERASE}{text}")
        self._puts = _puts()
        return True


def _puts() -> int:
    """How often this process has written to its outputs."""
    return sum(outlet.puts for outlet in _outlets.values())


def expect_a_line_for_now() -> None:
    """The process that started this one may show such a line: what is said here replaces it."""
    global _line
    if can_rewrite():
        _line = _LastLine(_ERASE)


def erase_line() -> None:
    """The last line is this process's own again, and empty."""
    global _line
    if _line != _LastLine():
        _line = _LastLine()
        with suppress(OSError, ValueError):
            print(_ERASE, end="", flush=True)


def leave_line_to_others(theirs: bool) -> None:
    """Whether the last line is another process's: what is said then begins on a new line."""
    global _line
    _line = _LastLine("\n" if theirs and can_rewrite() else "")


def lost_lines() -> int:
    """How many lines could not be shown, and have not been reported there yet."""
    return _unsaid + sum(outlet.lost for outlet in _outlets.values())


def at_the_end(tell: Callable[[], None]) -> None:
    """Call `tell` when this process is about to `leave`: it may still say something."""
    _farewells[tell.__qualname__] = tell


def leave(code: int) -> NoReturn:
    """End this process with `code`, now: a signal that comes meanwhile does not change that.

    The interpreter is not torn down. That would restore the signals' default actions, and wait for
    threads that may be stuck. Whatever is told but not written yet gets `LAST_WORDS` seconds.
    """
    _flush()
    for tell in _farewells.values():
        tell()
    settle_all(LAST_WORDS / 2)
    os._exit(code)


def _flush() -> None:
    """Write what the program has printed, and what else is left, if that takes no longer than
    `LAST_WORDS` seconds.
    """
    Courier("flush").prompt(Errand(_flush_buffers))
    settle_all(LAST_WORDS)


def _flush_buffers() -> None:
    for stream in (sys.stdout, sys.stderr, *_kept):  # some of which may not be ours
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
