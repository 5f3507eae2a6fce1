"""Files that tell of a run; no caller fails or waits if a write to them fails or is stuck.

A full disk, or storage that hangs, must not end a training whose state is intact. Lines that cannot
be written are kept, in order, and written as soon as that is possible again.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeAlias

from kempner.run.output.console import Courier, Errand

KEPT = 16 * 1024 * 1024
"""Characters that wait for storage that takes none at the moment; lines beyond are counted."""

RETRY = 1.0
"""Seconds between two tries to write to a file that could not be written."""

_LOOK, _LOOKS = 0.1, 5
"""Seconds between two looks whether half a line still grows, and the most of those looks."""

Tell: TypeAlias = Callable[[str, Mapping[str, object]], None]
"""Logs a sentence, with facts."""


class JsonLines:
    """A file of JSON lines. Use `open_lines`: one writer per file keeps the order.

    `tell` is called, from a thread, when lines cannot be written, and when they can again.
    """

    def __init__(self, path: Path, tell: Tell) -> None:
        self.path, self._tell = path, tell
        self._lines: deque[str] = deque()
        self._lock = threading.RLock()
        self._size = self._late = self._lost = 0
        self._errand, self._courier = Errand(self._write), Courier(path.name)
        _writers.add(self)

    def append(self, line: str) -> None:
        """Append a line, as a rule before this returns; never raises."""
        with self._lock:
            if self._size + len(line) <= KEPT:
                self._lines.append(line)
                self._size += len(line)
            else:
                self._lost += 1
        self._courier.prompt(self._errand)

    def unwritten(self) -> list[str]:
        """The lines that are kept because they could not be written yet, oldest first."""
        with self._lock:
            return list(self._lines)

    def start_anew(self) -> None:
        """In a forked child: what waits is the parent's to write."""
        self._lines, self._lock = deque(), threading.RLock()
        self._size = self._late = self._lost = 0

    def _write(self) -> float | None:
        try:
            self._write_all()
        except OSError as error:
            first, self._late = not self._late, len(self._lines)
            if first:
                self._tell("cannot write to file, keeping its lines", _facts(self.path, error))
            return RETRY
        if self._late:
            late, lost, self._late, self._lost = self._late, self._lost, 0, 0
            facts: dict[str, object] = {"file": str(self.path), "late": late, "lost": lost}
            self._tell("can write to file again", facts)
        return None

    def _write_all(self) -> None:
        """Raises `OSError`; what was written by then is forgotten."""
        if not self._lines:
            return
        descriptor = _open(self.path)
        try:
            _remove_half_a_line(descriptor, ours=self._late > 0)
            while self._lines:
                _write_whole(descriptor, f"{self._lines[0]}\n".encode(), self.path)
                with self._lock:
                    self._size -= len(self._lines.popleft())
        finally:
            os.close(descriptor)


class LatestContent:
    """A file that others look at now and then, replaced as a whole; only the newest content counts.

    `tell` is called, from a thread, when it cannot be written.
    """

    def __init__(self, path: Path, tell: Tell) -> None:
        self._path, self._tell = path, tell
        self._content = ""
        self._failed = False
        self._errand, self._courier = Errand(self._write), Courier(path.name)

    def replace(self, content: str) -> None:
        """Replace the content, as a rule before this returns; never raises."""
        self._content = content
        self._courier.prompt(self._errand)

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
    return {writer.path: len(lines) for writer in list(_writers) if (lines := writer.unwritten())}


def _facts(path: Path, error: OSError) -> dict[str, object]:
    return {"file": str(path), "error": error.strerror}


def _open(path: Path) -> int:
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    try:
        return os.open(path, flags, 0o644)
    except FileNotFoundError:
        path.parent.mkdir(exist_ok=True)  # but none above: it may be that nothing is mounted there
        return os.open(path, flags, 0o644)


def _write_whole(descriptor: int, content: bytes, path: Path) -> None:
    if os.write(descriptor, content) != len(content):
        raise OSError(errno.ENOSPC, "No space left for the whole line", str(path))


def _remove_half_a_line(descriptor: int, ours: bool) -> None:
    """Cut off what a writer that was killed, or had no space, left behind: readers expect lines.

    What is `ours` is written again as a whole. Another host's line may only seem torn, because not
    all of it is seen yet: what still changes is left alone. Raises `OSError`.
    """
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
_writers: weakref.WeakSet[JsonLines] = weakref.WeakSet()


def _forget_all() -> None:
    global _opening
    _opening = threading.RLock()
    for writer in list(_writers):
        writer.start_anew()


os.register_at_fork(after_in_child=_forget_all)
