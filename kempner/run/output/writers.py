"""What tells of a run is written by threads, so that no caller fails or waits for long.

A full disk, storage that hangs, or a terminal that takes nothing must not end or hold up a training
whose state is intact. What cannot be written yet is kept, in order and up to a bound, and written
as soon as that is possible again.

Nothing beyond the standard library is imported here: this is needed before anything else.
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
"""Seconds that a caller waits for a write that does not return; once, until one returns again."""

IDLE = 5.0
"""Seconds after which a thread ends that has nothing to write; the next item starts another."""

KEPT = 16 * 1024 * 1024
"""Characters that wait for storage that takes none at the moment; lines beyond are counted."""

RETRY = 1.0
"""Seconds between two tries to write to a file that could not be written."""

_LOOK, _LOOKS = 0.1, 5
"""Seconds between two looks whether half a line still grows, and the most of those looks."""

_TAIL_EVERY = 5.0
"""Seconds between two versions of the end of an output that is longer than what is kept of it."""

_PART_OF_A_LINE, _LONGEST_LINE = 1.0, 65536
"""Seconds that a line without an end waits for it, and its bytes from which on it does not."""

Tell: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Logs a sentence, with facts."""

Item = TypeVar("Item")


class Writer(ABC, Generic[Item]):
    """A thread that writes what it is given. Methods may be called from any thread; none raises.
    The caller waits until what it gave is written, so that it is there when the call returns; but
    never for longer than `PATIENCE`, and while an earlier write is stuck not at all. Items wait up
    to a total size of `kept`; what comes beyond is dropped. Only one thread at a time writes."""

    _asked: int
    _done: int
    _due_at: float
    _stuck: bool

    def __init__(self, name: str, kept: int = 0) -> None:
        self._name, self._kept = name, kept
        self._start_anew()
        _writers.add(self)

    def prompt(self, item: Item | None = None, size: int = 0, ahead: int = 0) -> None:
        """Have what waits, and `item` if there is room, written now; wait as long as there is
        patience, and a total of `ahead` or more waits."""
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
                self._write()  # no thread is to be had: rather wait than keep silent
            elif not (self._stuck or threading.current_thread() is self._thread):
                done = lambda: self._done >= turn or self._given - self._taken < ahead  # noqa: E731
                self._stuck = not self._changed.wait_for(done, PATIENCE)

    def ask_again(self) -> int:
        """Have whatever is left tried once more, from now on; the turn to wait for."""
        with self._changed:
            if self._running or self._due_at < math.inf:
                self._asked += 1
                self._due_at = min(self._due_at, time.monotonic())
                self._changed.notify_all()
                return self._asked
            return self._done

    def wait_for(self, turn: int, seconds: float) -> bool:
        """Wait until that turn is over; whether it was within `seconds`."""
        with self._changed:
            alive = self._thread is not None and self._thread.is_alive()
            if self._done >= turn or not (alive or self._start_thread()):
                return self._done >= turn
            return self._changed.wait_for(lambda: self._done >= turn, seconds)

    @abstractmethod
    def _write(self) -> float | None:
        """Write what waits, without raising `OSError`; the seconds after which to try again, None
        where nothing is left."""

    def _drop(self, item: Item) -> None:
        """An item is lost. Called with the lock held."""

    def _start_anew(self) -> None:
        """Begin without a thread and with nothing to do; a forked child leaves the parent's."""
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
    """Give every writer of this process the chance to end what it has to do; `seconds` in all."""
    end = time.monotonic() + seconds
    # All at once: what one of them cannot end must not take the time of the others.
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
        """Append an object, as a rule before this returns; never raises for the file's sake."""
        line = json_line(entry)
        self.prompt(line, len(line))

    def unwritten(self) -> list[str]:
        """The lines that are kept because they could not be written yet, oldest first."""
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
        """Raises `OSError`; what was written by then is forgotten."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        try:
            descriptor = os.open(self.path, flags, 0o666)
        except FileNotFoundError:
            # None above: it may be that nothing is mounted there.
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
    """Bytes of what a process prints that are kept: the first `head`, and the last `tail`."""

    head: int = 16 << 20
    tail: int = 2 << 20


class KeptOutput(Writer[None]):
    """What a process prints, in a file for its owner alone: the first of it and the last, and in
    between a line with the number of bytes that were left out.

    `masked` takes out secrets, of whole lines. `tell` is called, from a thread, when the file
    cannot be written; what then finds no room in memory is left out, too.
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
        self._new, self._skipped = bytearray(), 0
        self._rest, self._left_out = bytearray(), 0
        self._tail_at = 0.0
        self._over = self._failed = False
        super().__init__(path.name)

    def add(self, chunk: bytes) -> None:
        """The next bytes; as a rule they are written before this returns, but once only the tail
        of what comes is kept, with its next version."""
        with self._changed:
            self._new += chunk
            only_tail = self._failed or self._left_out or 0 < self._most <= self._head
            if (only_tail or self._stuck) and len(self._new) > 2 * self._bounds.tail:
                self._skipped += self._shorten(self._new)
            if only_tail and self._due_at < math.inf:
                return
        self.prompt()

    def close(self) -> None:
        """Nothing more comes."""
        self._over = True
        self.prompt()

    def _write(self) -> float | None:
        with self._changed:
            new, skipped = self._new, self._skipped
            self._new, self._skipped = bytearray(), 0
        if skipped:  # what there is from before is older than the tail
            self._left_out += skipped + len(self._rest)
            self._rest.clear()
        self._rest += new
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
            self._rest.clear()  # it is written, and may be asked for again
        return again

    def _store(self) -> float | None:
        """Seconds until the rest is to be written; None if there is none. Raises `OSError`."""
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
                said = f"\n[kempner: {self._left_out:,} bytes are left out here]\n"
                self._put(said.encode(), head)
            self._put(self._masked(bytes(self._rest)), self._head)
            os.ftruncate(self._descriptor, self._head)
        finally:
            self._head = head
        return None

    def _next_lines(self) -> bytes:
        """The whole lines that the head has room for; all there is of a line without an end."""
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
        """Leave out what is older than the tail. The number of bytes left out."""
        older = max(0, len(output) - self._bounds.tail)
        del output[:older]
        return older


class LatestContent(Writer[str]):
    """A file that is replaced as a whole; only the newest content counts. `tell` is called, from a
    thread, when it cannot be written."""

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
"""The line that an object becomes in a file."""


def open_lines(path: Path, tell: Tell) -> JsonLines:
    """The one writer of this process for `path`; it stays open until its last user closes it."""
    key = str(path.absolute())
    with _opening:
        found = _by_path.get(key)
        if found is None:
            found = _by_path[key] = JsonLines(path, tell)
        return found


def unwritten_lines() -> dict[Path, int]:
    """How many lines of which files are kept because they could not be written."""
    files = [writer for writer in list(_writers) if isinstance(writer, JsonLines)]
    return {writer.path: len(writer._waiting) for writer in files if writer._waiting}


def _facts(path: Path, error: OSError) -> dict[str, object]:
    return {"file": str(path), "error": error.strerror}


def _remove_half_a_line(descriptor: int, ours: bool) -> None:
    """Cut off what a writer that was killed, or had no space, left behind: readers expect lines.
    What is `ours` is written again as a whole. Another host's line may only seem torn, because not
    all of it is seen yet: what still changes is left alone. Raises `OSError`."""
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
    """What follows the last line break."""
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
    """Shorten the file; whether that was possible: a file that is append-only cannot be."""
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
