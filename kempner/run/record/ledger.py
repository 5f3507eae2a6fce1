"""The ledger: append-only events of a run, one JSON object per line.

The supervisor writes it, and gets rank 0's events over the control channel; without a supervisor
rank 0 writes it. A line torn by a kill is skipped by readers and never merges with the next one.
docs/events.md lists the events.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from kempner.run.output.logs import warn
from kempner.run.output.writers import json_line, open_lines
from kempner.run.record.events import LedgerEvent

SCHEMA = 1


class EventRecorder(Protocol):
    """Records an event in the run's ledger; calls on ranks other than 0 may do nothing."""

    def __call__(self, event: LedgerEvent) -> None: ...


class Ledger:
    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_lines(path, warn)
        self._hear: Callable[[str], object] = len  # no listener

    def tell(self, hear: Callable[[str], object]) -> None:
        """Call `hear` with each line that is not written yet, and with later ones."""
        self._hear = hear
        for line in self.unwritten():
            hear(line)

    def unwritten(self) -> list[str]:
        return self._file.unwritten()

    def record(self, event: LedgerEvent, attempt: int) -> None:
        head = {"schema": SCHEMA, "time": round(time.time(), 3), "event": event.name}
        entry = {**head, "attempt": attempt, **event.to_fields()}
        self._hear(json_line(entry))  # first, or it could be read from the file before
        self._file.append(entry)


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete JSON objects of a .jsonl file, in order; nothing if the file is absent."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    yield from parse_lines(content)


def parse_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The complete JSON objects among these lines, in order."""
    for line in content.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a kill, and so never reported as written
        if isinstance(entry, dict):
            yield entry


FIRST_BLOCK, LARGEST_BLOCK = 128 << 10, 4 << 20
"""Bytes of the first and of the largest block when a file is read from the end."""

LIMIT = 64 << 20
"""Most bytes that are read from the end."""


class FileTail:
    """Follows a file of lines: each `read` returns only new ones. The first read returns the whole
    file, or with `enough` only its end: `enough` counts matches in a block, and reading back stops
    once there are `wanted`. `keep` filters the lines."""

    def __init__(
        self,
        path: Path,
        enough: Callable[[bytes], int] | None = None,
        wanted: int = 1,
        keep: Callable[[list[bytes]], list[bytes]] = list,
    ) -> None:
        self.path, self._enough, self._wanted, self._keep = path, enough, wanted, keep
        self._file: tuple[int, int] | None = None
        self._read_up_to = 0
        self.whole = True
        """Whether the lines read begin with the first one of the file."""

    def read(self) -> tuple[list[bytes], bool]:
        """The new lines (none if there is no file yet), and whether they replace all lines read
        before. Raises `OSError`."""
        try:
            with self.path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            if self._file is not None:
                raise  # its storage is away
            return [], False

    def _read(self, file: BinaryIO) -> tuple[list[bytes], bool]:
        found = os.fstat(file.fileno())
        same = self._file == (found.st_dev, found.st_ino)
        grown = found.st_size - self._read_up_to
        follow = same and grown >= 0 and (self._enough is None or grown <= LIMIT)
        self._file = (found.st_dev, found.st_ino)
        if follow:
            file.seek(self._read_up_to)
            content = file.read(grown)
        else:
            size, enough = found.st_size, self._enough
            content = file.read(size) if enough is None else self._read_back(file, size, enough)
            self._read_up_to = found.st_size - len(content)
        torn = content[content.rfind(b"\n") + 1 :]
        if torn and not any(parse_lines(torn)):  # otherwise only its newline is missing
            content = content[: -len(torn)]
        self._read_up_to += len(content)
        return self._keep(content.splitlines()), not follow

    def _read_back(self, file: BinaryIO, end: int, enough: Callable[[bytes], int]) -> bytes:
        blocks, begin, block, found = list[bytes](), end, FIRST_BLOCK, 0
        while begin > 0 and found < self._wanted and end - begin < LIMIT:
            size = min(block, begin)
            begin, block = begin - size, min(2 * block, LARGEST_BLOCK)
            file.seek(begin)
            blocks.append(file.read(size))
            found += enough(blocks[-1])
        content = b"".join(reversed(blocks))
        self.whole = begin == 0
        return content if self.whole else content[content.find(b"\n") + 1 :]
