"""Packs documents into rows of equal length: best fit decreasing, within a window.

Longest first, a document goes into the row that it fills best (D. S. Johnson, "Near-optimal bin
packing algorithms", MIT, 1973). That is done for some millions of tokens at a time, so that memory
is bounded and a row depends on the documents around it only, never on who reads them.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kempner.data.files.token_file import BEGINS, TokenWriter

WINDOW = 4 * 2**20
"""Tokens that are packed together. A change gives the same chats another fingerprint."""


class RowWriter:
    """Writes rows of `seq_len` tokens, each with whole documents, and filled up by one document of
    `padding` that is not learned."""

    def __init__(self, writer: TokenWriter, seq_len: int, padding: int) -> None:
        self._writer, self._seq_len, self._padding = writer, seq_len, padding
        self._held: list[NDArray[np.uint32]] = []
        self._tokens = 0

    def add(self, tokens: NDArray[np.uint32]) -> None:
        """Tokens [k], k at most `seq_len`, with their flags, that stay together in a row."""
        self._held.append(tokens)
        self._tokens += tokens.size
        if self._tokens >= WINDOW:
            self._write()

    def finish(self, last: bool) -> None:
        """Write what is held; and, if it is the last of the stream, the token behind it, which a
        sample of the last row takes as the target of its last token."""
        self._write()
        if last:
            self._writer.append(self._filled(1))

    def _write(self) -> None:
        for row in packed([each.size for each in self._held], self._seq_len):
            parts = [self._held[number] for number in row]
            free = self._seq_len - sum(part.size for part in parts)
            self._writer.append(np.concatenate([*parts, self._filled(free)]))
        self._held, self._tokens = [], 0

    def _filled(self, count: int) -> NDArray[Any]:
        padding = np.full(count, self._padding, np.uint32)
        padding[:1] |= BEGINS
        return padding


def packed(sizes: Sequence[int], capacity: int) -> Iterator[list[int]]:
    """The numbers of the documents of each row, ascending, rows by their first document. No size
    may exceed `capacity`."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # tokens left in a row and its number, ascending
    for number in sorted(range(len(sizes)), key=lambda each: -sizes[each]):
        at = bisect_left(free, (sizes[number], -1))
        if at < len(free):
            left, row = free.pop(at)
            rows[row].append(number)
        else:
            left, row = capacity, len(rows)
            rows.append([number])
        if left > sizes[number]:
            insort(free, (left - sizes[number], row))
    return iter(sorted(sorted(row) for row in rows))
