"""The end of a file of JSON lines, and what is added to it later: never the whole of a large one.

A run of weeks has a million lines of metrics and a ledger of tens of megabytes, on storage that the
run needs for itself.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from kempner.run.record.ledger import parse_lines

FIRST_BLOCK, LARGEST_BLOCK = 128 << 10, 4 << 20
"""Bytes that are read at a time, from the end: at first, and at most."""

LIMIT = 64 << 20
"""Bytes that are read at most."""

Lines = list[dict[str, Any]]


class Tail:
    """Follows a file. `enough` looks at a block from its end, and says how much of what is wanted
    it holds; reading stops at `wanted` of it. `keep` says which of the lines are to be parsed.
    """

    def __init__(
        self,
        path: Path,
        enough: Callable[[bytes], int],
        wanted: int,
        keep: Callable[[list[bytes]], list[bytes]] = list,
    ) -> None:
        self._path, self._enough, self._wanted, self._keep = path, enough, wanted, keep
        self._file: tuple[int, int] | None = None
        self._read_up_to = 0
        self.whole = True
        """Whether the first line that was read is the first one of the file."""

    def read(self) -> tuple[Lines, bool]:
        """The lines that are new, and whether they take the place of all that was read before.

        No lines of a file that is not there yet. Raises `OSError` if it cannot be read now.
        """
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            if self._file is not None:
                raise  # its storage is away
            return [], False

    def _read(self, file: BinaryIO) -> tuple[Lines, bool]:
        found = os.fstat(file.fileno())
        same = self._file == (found.st_dev, found.st_ino)
        grown = found.st_size - self._read_up_to
        follow = same and 0 <= grown <= LIMIT
        self._file = (found.st_dev, found.st_ino)
        if follow:
            file.seek(self._read_up_to)
            content = file.read(grown)
        else:
            content = self._read_back(file, found.st_size)
            self._read_up_to = found.st_size - len(content)
        torn = content[content.rfind(b"\n") + 1 :]
        if torn and not any(parse_lines(torn)):  # else only its newline is missing
            content = content[: -len(torn)]
        self._read_up_to += len(content)
        return list(parse_lines(b"\n".join(self._keep(content.splitlines())))), not follow

    def _read_back(self, file: BinaryIO, end: int) -> bytes:
        blocks, begin, block, found = list[bytes](), end, FIRST_BLOCK, 0
        while begin > 0 and found < self._wanted and end - begin < LIMIT:
            size = min(block, begin)
            begin, block = begin - size, min(2 * block, LARGEST_BLOCK)
            file.seek(begin)
            blocks.append(file.read(size))
            found += self._enough(blocks[-1])
        content = b"".join(reversed(blocks))
        self.whole = begin == 0
        return content if self.whole else content[content.find(b"\n") + 1 :]
