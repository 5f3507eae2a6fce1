"""Threads that write logs, output and metrics, so that no caller fails or waits for long.

A full disk, storage that hangs, or a blocked terminal must not end or hold up a training whose
state is intact. What cannot be written yet is kept, in order and up to a bound, and written as soon
as possible.

Imports only the standard library: this is needed before all else.
"""

from __future__ import annotations

import errno
import json
import math
import os
import sys
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeAlias, TypeVar

PATIENCE = 0.5
"""Seconds that a caller waits for a write; not again until a write has returned."""

IDLE = 5.0
"""Seconds after which an idle thread ends; the next item starts another."""

KEPT = 16 * 1024 * 1024
"""Characters kept while storage fails; lines beyond them are dropped and counted."""

RETRY = 1.0
"""Seconds between two attempts to write a file that cannot be written."""

_LOOK, _LOOKS = 0.1, 5
"""Seconds between two looks whether an incomplete line still grows, and the most looks."""

_TAIL_EVERY = 5.0
"""Seconds between two updates of an output's tail, once more was printed than is kept."""

_PART_OF_A_LINE, _LONGEST_LINE = 1.0, 65536
"""Seconds that an incomplete line waits for its end, and bytes above which it does not wait."""

Tell: TypeAlias = Callable[[str, Mapping[str, object]], None]


Item = TypeVar("Item")


class Writer(ABC, Generic[Item]):
    """A thread that writes items. Methods may be called from any thread; none raises.

    A caller waits until its item is written, but at most `PATIENCE` seconds, and not at all while
    an earlier write is stuck. Items of a total size of `kept` may wait; more are dropped. Only one
    thread writes at a time.
    """

    _asked: int
    _done: int
    _due_at: float
    _stuck: bool

    def __init__(self, name: str, kept: int = 0) -> None:
        self._name, self._kept = name, kept
        self._start_anew()
        _writers.add(self)

    def prompt(self, item: Item | None = None, size: int = 0, ahead: int = 0) -> None:
        """Write what waits, and `item` if there is room, now; wait at most `PATIENCE` seconds, and
        only while items of a total size of `ahead` or more wait."""
        if sys.is_finalizing():  # no other thread runs any more, and one may have held the lock
            if item is not None:
                self._waiting.append((item, size))
            self._write()
            return
        with self._changed:
            if item is not None and self._waiting and self._given + size > self._taken + self._kept:
                self._drop(item)
            elif item is not None:
                self._waiting.append((item, size))
                self._given += size
            turn = self._asked = self._asked + 1
            self._due_at = min(self._due_at, time.monotonic())
            self._changed.notify_all()
            alive = self._thread is not None and self._thread.is_alive()
            if not (alive or self._start_thread()):
                self._write()  # no thread can be started: write here, and wait
            elif not (self._stuck or threading.current_thread() is self._thread):
                done = lambda: self._done >= turn or self._given - self._taken < ahead  # noqa: E731
                self._stuck = not self._changed.wait_for(done, PATIENCE)

    def ask_again(self) -> int:
        """Ask for another attempt to write what is left; returns the turn to pass to `wait_for`."""
        with self._changed:
            if self._running or self._due_at < math.inf:
                self._asked += 1
                self._due_at = min(self._due_at, time.monotonic())
                self._changed.notify_all()
                return self._asked
            return self._done

    def wait_for(self, turn: int, seconds: float) -> bool:
        """Wait until that turn is over; False after `seconds`."""
        with self._changed:
            alive = self._thread is not None and self._thread.is_alive()
            if self._done >= turn or not (alive or self._start_thread()):
                return self._done >= turn
            return self._changed.wait_for(lambda: self._done >= turn, seconds)

    @abstractmethod
    def _write(self) -> float | None:
        """Write what waits, without raising `OSError`. Returns the seconds until the next attempt,
        None if nothing is left."""

    def _drop(self, item: Item) -> None:
        """Note that an item is lost. Called with the lock held."""

    def _start_anew(self) -> None:
        """Set the initial state, also in a forked child, which leaves the parent's items alone."""
        self._changed = threading.Condition()
        self._waiting: deque[tuple[Item, int]] = deque()
        self._given = self._taken = self._asked = self._done = 0
        self._due_at = math.inf
        self._running = self._stuck = False
        self._thread: threading.Thread | None = None

    def _start_thread(self) -> bool:
        self._thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
        self._running = False
        try:
            self._thread.start()
        except RuntimeError:  # out of threads, or the interpreter is about to end
            self._thread = None
        return self._thread is not None

    def _serve(self) -> None:
        while True:
            with self._changed:
                while (wait := self._due_at - time.monotonic()) > 0:
                    if not self._changed.wait(min(wait, IDLE)) and self._due_at == math.inf:
                        self._thread = None
                        return
                turn, self._due_at, self._running = self._asked, math.inf, True
            again = self._write()
            with self._changed:
                self._done, self._running, self._stuck = turn, False, False
                if again is not None:
                    self._due_at = min(self._due_at, time.monotonic() + again)
                self._changed.notify_all()


_writers: weakref.WeakSet[Writer[Any]] = weakref.WeakSet()


def settle_all(seconds: float) -> None:
    """Wait until all writers of this process are done, at most `seconds` in all."""
    end = time.monotonic() + seconds
    # All at once: one that is stuck must not take the time of the others.
    asked = [(writer, writer.ask_again()) for writer in list(_writers)]
    for writer, turn in asked:
        writer.wait_for(turn, max(0.0, end - time.monotonic()))


class JsonLines(Writer[str]):
    """A file of JSON lines. Use `open_lines`: one writer per file keeps the order. `tell` is
    called, from a thread, when lines cannot be written, and when they can again."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self._tell = path, tell
        super().__init__(path.name, KEPT)

    def append(self, entry: Mapping[str, object]) -> None:
        """Append an object, as a rule before this returns; a failing file raises nothing."""
        line = json_line(entry)
        self.prompt(line, len(line))

    def unwritten(self) -> list[str]:
        """The lines that could not be written yet, oldest first."""
        with self._changed:
            return [line for line, _ in self._waiting]

    def _start_anew(self) -> None:
        super()._start_anew()
        self._late = self._lost = 0

    def _drop(self, item: str) -> None:
        self._lost += 1

    def _write(self) -> float | None:
        try:
            if self._waiting:
                self._write_lines()
        except OSError as error:
            first, self._late = not self._late, len(self._waiting)
            if first:
                self._tell("cannot write to file, keeping its lines", _facts(self.path, error))
            return RETRY
        if self._late:
            late, lost, self._late, self._lost = self._late, self._lost, 0, 0
            facts: dict[str, object] = {"file": str(self.path), "late": late, "lost": lost}
            self._tell("can write to file again", facts)
        return None

    def _write_lines(self) -> None:
        """Write and remove waiting lines. Raises `OSError`; the lines not written stay."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            # No parents: maybe the file system is not mounted.
            self.path.parent.mkdir(exist_ok=True)
            descriptor = os.open(self.path, flags, 0o666)
        try:
            end = os.fstat(descriptor).st_size
            if end and os.pread(descriptor, 1, end - 1) != b"\n":
                _remove_half_a_line(descriptor, ours=self._late > 0)
            while self._waiting:
                content = f"{self._waiting[0][0]}\n".encode()
                if os.write(descriptor, content) != len(content):
                    raise OSError(errno.ENOSPC, "No space left for the whole line", str(self.path))
                self._taken += self._waiting.popleft()[1]
        finally:
            os.close(descriptor)


@dataclass(frozen=True)
class OutputBounds:
    """Bytes of a process's output that are kept: the first `head` and the last `tail`."""

    head: int = 16 << 20
    tail: int = 2 << 20


class _Tail:
    """The last `size` bytes of an output, or a piece more: old ones are dropped without copying the
    others."""

    def __init__(self, size: int) -> None:
        self._most, self._piece = size, max(1, size // 32)
        self._pieces: deque[bytes | bytearray] = deque()
        self._size = 0

    def append(self, chunk: bytes) -> None:
        self._size += len(chunk)
        last = self._pieces[-1] if self._pieces else b""
        if isinstance(last, bytearray) and len(last) + len(chunk) <= self._piece:
            last += chunk
        else:
            self._pieces.append(bytearray(chunk) if 2 * len(chunk) < self._piece else chunk)

    def shorten(self) -> int:
        """Drop the pieces that are older; returns the number of bytes dropped."""
        before = self._size
        while self._pieces and self._size - len(self._pieces[0]) >= self._most:
            self._size -= len(self._pieces.popleft())
        return before - self._size

    def joined(self) -> bytes:
        return b"".join(self._pieces)


class KeptOutput(Writer[None]):
    """Keeps the head and the tail of a process's output in a file that only its owner can read;
    between them a line gives the number of bytes left out.

    `masked` removes secrets from whole lines. `tell` is called, from a thread, when the file cannot
    be written; output that then finds no room in memory is left out, too.
    """

    def __init__(
        self,
        path: Path,
        tell: Tell,
        masked: Callable[[bytes], bytes],
        bounds: OutputBounds = OutputBounds(),
    ) -> None:
        self._path, self._tell, self._masked, self._bounds = path, tell, masked, bounds
        self._descriptor, self._head, self._most = -1, 0, 0
        self._new, self._skipped = _Tail(self._bounds.tail), 0
        self._rest, self._left_out = bytearray(), 0
        self._tail_at = 0.0
        self._over = self._failed = False
        super().__init__(path.name)

    def add(self, chunk: bytes) -> None:
        """Add the next bytes; as a rule they are written before this returns, or, once only the
        tail is kept, with its next update."""
        with self._changed:
            self._new.append(chunk)
            only_tail = self._failed or self._left_out or 0 < self._most <= self._head
            if only_tail or self._stuck:
                self._skipped += self._new.shorten()
            if only_tail and self._due_at < math.inf:
                return
        self.prompt()

    def close(self) -> None:

        self._over = True
        self.prompt()

    def _write(self) -> float | None:
        with self._changed:
            new, skipped = self._new, self._skipped
            self._new, self._skipped = _Tail(self._bounds.tail), 0
        if skipped:  # all earlier bytes are older than the tail
            self._left_out += skipped + len(self._rest)
            self._rest.clear()
        self._rest += new.joined()
        try:
            again = self._store()
        except OSError as error:
            if not self._failed:
                self._tell("cannot write what a rank prints", _facts(self._path, error))
            self._failed = True
            self._left_out += self._shorten(self._rest)
            if not self._over:
                return RETRY
            again = None
        if self._over and self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
            self._rest.clear()  # it is written, and `_write` may be called again
        return again

    def _store(self) -> float | None:
        """Write; returns the seconds until the rest is due, None if there is none. Raises
        `OSError`."""
        if self._descriptor < 0 and (self._rest or not self._over):
            self._descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._head = os.fstat(self._descriptor).st_size
            self._most = self._head + self._bounds.head
        while not self._left_out and (piece := self._next_lines()):
            self._put(self._masked(piece), self._head)
            del self._rest[: len(piece)]
        self._left_out += self._shorten(self._rest)
        if not self._rest:
            return None
        wait = self._tail_at - time.monotonic()
        if wait > 0 and not self._over:
            return wait
        if self._head < self._most and not self._left_out and not self._over:
            self._tail_at = time.monotonic() + _PART_OF_A_LINE
            return _PART_OF_A_LINE
        self._tail_at = time.monotonic() + _TAIL_EVERY
        head = self._head
        try:
            if self._left_out:
                note = f"\n[kempner: {self._left_out:,} bytes are left out here]\n"
                self._put(note.encode(), head)
            self._put(self._masked(bytes(self._rest)), self._head)
            os.ftruncate(self._descriptor, self._head)
        finally:
            self._head = head
        return None

    def _next_lines(self) -> bytes:
        """The whole lines that fit into the head; all of an incomplete line that is too long."""
        piece = bytes(self._rest[: max(0, self._most - self._head)])
        end = max(piece.rfind(b"\n"), piece.rfind(b"\r")) + 1
        return piece if len(piece) > end + _LONGEST_LINE else piece[:end]

    def _put(self, content: bytes, at: int) -> None:
        left = memoryview(content)
        while left:
            written = os.pwrite(self._descriptor, left, at)
            left, at = left[written:], at + written
        self._head = at

    def _shorten(self, output: bytearray) -> int:
        """Drop what is older than the tail; returns the number of bytes dropped."""
        older = max(0, len(output) - self._bounds.tail)
        del output[:older]
        return older


class LatestContent(Writer[str]):
    """A file that is always replaced as a whole. `tell` is called, from a thread, when it cannot be
    written."""

    def __init__(self, path: Path, tell: Tell) -> None:
        self._path, self._tell = path, tell
        self._content = ""
        self._failed = False
        super().__init__(path.name)

    def replace(self, content: str) -> None:
        """Replace the content, as a rule before this returns; never raises."""
        self._content = content
        self.prompt()

    def _write(self) -> float | None:
        new = self._path.with_name(f".{self._path.name}.new")
        try:
            new.write_text(self._content)
            new.replace(self._path)
        except OSError as error:
            if not self._failed:
                self._tell("cannot be written", _facts(self._path, error))
            self._failed = True
            return RETRY
        self._failed = False
        return None


json_line = partial(json.dumps, default=str)


def open_lines(path: Path, tell: Tell) -> JsonLines:
    """The one writer of this process for `path`; it stays open until its last user closes it."""
    key = str(path.absolute())
    with _opening:
        found = _by_path.get(key)
        if found is None:
            found = _by_path[key] = JsonLines(path, tell)
        return found


def unwritten_lines() -> dict[Path, int]:
    """The number of lines, by file, that could not be written yet."""
    files = [writer for writer in list(_writers) if isinstance(writer, JsonLines)]
    return {writer.path: len(writer._waiting) for writer in files if writer._waiting}


def _facts(path: Path, error: OSError) -> dict[str, object]:
    return {"file": str(path), "error": error.strerror}


def _remove_half_a_line(descriptor: int, ours: bool) -> None:
    """Remove an incomplete last line, which a killed writer or a full disk has left. If it is
    `ours`, it is written again as a whole. Another host's line may only seem incomplete because not
    all of it is visible yet: a line that still changes stays. Raises `OSError`."""
    tail, at_rest = _tail(descriptor), ours
    for _ in range(_LOOKS):
        if at_rest or not tail:
            break
        before = tail
        time.sleep(_LOOK)
        tail = _tail(descriptor)
        at_rest = tail == before
    useless = at_rest and (ours or not _is_whole(tail))
    if tail and not (useless and _cut(descriptor, len(tail))):
        os.write(descriptor, b"\n")


def _tail(descriptor: int) -> bytes:

    end, tail, step = os.fstat(descriptor).st_size, b"", 1
    while len(tail) < end:
        step = min(64 * step, end - len(tail), 1 << 20)
        tail = os.pread(descriptor, step, end - len(tail) - step) + tail
        if b"\n" in tail:
            return tail.rpartition(b"\n")[2]
    return tail


def _is_whole(tail: bytes) -> bool:
    """Whether nothing but the line break is missing."""
    try:
        return isinstance(json.loads(tail), dict)
    except ValueError:
        return False


def _cut(descriptor: int, length: int) -> bool:
    """Shorten the file; False if it is append-only."""
    try:
        os.ftruncate(descriptor, os.fstat(descriptor).st_size - length)
    except PermissionError:
        return False
    return True


_opening = threading.RLock()
_by_path: weakref.WeakValueDictionary[str, JsonLines] = weakref.WeakValueDictionary()


def _forget_all() -> None:
    global _opening
    _opening = threading.RLock()
    for writer in list(_writers):
        writer._start_anew()


os.register_at_fork(after_in_child=_forget_all)
