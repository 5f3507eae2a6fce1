"""Encodes a document of any length in bounded memory, with the tokens of the whole document.

A tokenizer of Hugging Face needs some hundred bytes of memory for a byte of text, so a long text
is encoded in blocks. What follows a cut is encoded with the text before it in front, whose tokens
are then dropped. A cut is good if, with three lengths of that text, the tokens before it do not
depend on what follows, and those after it do not depend on where the text in front begins. So
nothing is assumed about normalizers, prefixes and merges but that they reach no further than the
text in front.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ids = Callable[[str], list[int]]  # the tokens of a text
CONTEXT = 192  # bytes of text in front of what follows a cut
BLOCK = 256 * 2**10  # bytes that are encoded at a time
_WINDOW = 16 * 2**10  # bytes before the end of a block in which a cut is looked for
_CONTEXTS = (CONTEXT, 130, 62)  # each leaves another rest by three: digits are often grouped so
_TRIES = 16
# Best first: an end of a line, a space between words, any character.
_PLACES = (
    re.compile(rb"(?<=\S\n)(?=\S)"),
    re.compile(rb"(?<=\S)(?= \S)"),
    re.compile(rb"(?=[\x00-\x7f\xc0-\xff])"),
)


def find_cut(text: bytes | bytearray, start: int, stop: int, ids: Ids) -> int | None:
    """The position of a good cut within [start, stop] of UTF-8; None if none was found. It looks at
    some bytes before `start` and behind `stop`, if they are there."""
    for place in _PLACES:
        for match in islice(place.finditer(text, max(1, start), stop), _TRIES):
            if _is_good(text, match.start(), ids):
                return match.start()
    return None


def _is_good(text: bytes | bytearray, at: int, ids: Ids) -> bool:
    after = _characters(text[at : at + CONTEXT])
    if not after:
        return False
    tails = []
    for length in _CONTEXTS:
        before = _characters(text[max(0, at - length) : at])
        head, both = ids(before), ids(before + after)
        if both[: len(head)] != head:
            return False
        tails.append(both[len(head) :])
    return all(tail == tails[0] for tail in tails)


def _characters(text: bytes | bytearray) -> str:
    """The whole characters of a part of UTF-8."""
    return text.decode("utf-8", errors="ignore")


class ByteEncoder:
    """Encodes a document, which comes in parts of whole characters: every byte is a token."""

    unproven = 0

    def feed(self, text: bytes) -> Iterator[NDArray[Any]]:
        yield np.frombuffer(text, np.uint8)

    def end(self) -> NDArray[Any]:
        return np.empty(0, np.uint8)


class BlockEncoder:
    """Encodes one block by block; `before` is the text in front of its first part."""

    def __init__(self, ids: Ids, before: bytes = b"") -> None:
        self.unproven = 0  # cuts so far that may have changed a token: no good one was found
        self._ids = ids
        self._front, self._dropped = "", 0
        self._pending = bytearray()
        if before:
            self._put_in_front(before)

    def feed(self, text: bytes) -> Iterator[NDArray[Any]]:
        self._pending += text
        while len(self._pending) >= BLOCK + CONTEXT:
            cut = find_cut(self._pending, max(1, BLOCK - _WINDOW), BLOCK, self._ids)
            if cut is None:
                self.unproven += 1
                cut = _start_of_character(self._pending, BLOCK)
            yield self._encode(cut)
            self._put_in_front(self._pending[max(0, cut - CONTEXT) : cut])
            del self._pending[:cut]

    def end(self) -> NDArray[Any]:
        tokens = self._encode(len(self._pending))
        self._pending.clear()
        return tokens

    def _encode(self, stop: int) -> NDArray[Any]:
        if not stop:
            return np.empty(0, np.int64)
        ids = self._ids(self._front + self._pending[:stop].decode("utf-8"))
        return np.array(ids[self._dropped :], np.int64)

    def _put_in_front(self, text: bytes | bytearray) -> None:
        self._front = _characters(text)
        self._dropped = len(self._ids(self._front))


def _start_of_character(text: bytearray, at: int) -> int:
    while text[at] & 0xC0 == 0x80:
        at -= 1
    return at
