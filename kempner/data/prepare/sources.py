"""Splits input files into units of work, each of which becomes a token file, and reads them.

The units depend on the files and on the tokenizer, never on the number of workers.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO, cast

from xxhash import xxh3_128

from kempner.data.files.index import ShardSource
from kempner.data.prepare.inputs import SourceFile
from kempner.data.prepare.long_text import CONTEXT, find_cut
from kempner.data.prepare.packed import UnpackError, open_packed, row_groups
from kempner.data.prepare.tokenizers import TokenizerSpec
from kempner.run.process.exit_codes import DataError, cannot_read

# A change of these cuts the same files into other shards, which gives them another fingerprint.
_UNIT = 8 * 2**20
_MOST_UNITS = 1024
_LARGEST_PIECE = 64 * 2**20
_WINDOW = 64 * 2**10
_BUFFER = 256 * 2**10


@dataclass(frozen=True)
class Piece:
    """The bytes [start, stop) of a file, as they are on disk."""

    file: SourceFile
    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    @property
    def ends_document(self) -> bool:
        """Whether a document ends with the piece (lines and rows end theirs by themselves)."""
        return not self.file.one_document or self.stop == self.file.size


@dataclass(frozen=True)
class Unit:
    number: int
    pieces: tuple[Piece, ...]
    last: bool = False

    @property
    def shard_file(self) -> str:
        return f"shard-{self.number:05d}.tokens"

    @property
    def size(self) -> int:
        return sum(piece.size for piece in self.pieces)


def plan_units(
    files: Sequence[SourceFile], tokenizer: TokenizerSpec, text_key: str | tuple[str, ...]
) -> tuple[Unit, ...]:
    """Cut large files into pieces and gather small ones, so that shards are few but not huge. Lines
    stay whole, and a text is cut only where that changes no token; a packed file is one piece.
    Raises DataError if a file cannot be read, UsageError if a table has no such column, or none of
    several."""
    target = max(_UNIT, -(-sum(file.size for file in files) // _MOST_UNITS))
    units: list[Unit] = []
    gathered: list[Piece] = []
    size = 0
    for file in files:
        for piece in _cut(file, min(target, _LARGEST_PIECE), tokenizer, text_key):
            if gathered and size + piece.size > target:
                units.append(Unit(len(units), tuple(gathered)))
                gathered, size = [], 0
            gathered.append(piece)
            size += piece.size
    return (*units, Unit(len(units), tuple(gathered), last=True))


def _cut(
    file: SourceFile, length: int, tokenizer: TokenizerSpec, text_key: str | tuple[str, ...]
) -> list[Piece]:
    bounds = list(range(length, file.size, length))
    try:
        if file.format == "parquet":
            starts = row_groups(file.path, text_key)
            found = {next((at for at in starts if at >= bound), 0) for bound in bounds}
            bounds = sorted(found - {0})
        elif file.packing:
            bounds = []
        elif file.format == "jsonl":
            bounds = _line_ends(file, bounds)
        elif not tokenizer.splits_anywhere:
            bounds = _safe_cuts(file, bounds, tokenizer)
    except OSError as error:
        raise cannot_read(file.path, error) from error
    edges = [0, *bounds, file.size]
    return [Piece(file, start, stop) for start, stop in pairwise(edges)]


def _line_ends(file: SourceFile, bounds: Sequence[int]) -> list[int]:
    """The first end of a line at or after each of `bounds`, short of the end of the file."""
    ends: set[int] = set()
    with open(file.path, "rb") as lines:
        for bound in bounds:
            lines.seek(bound - 1)
            while (part := lines.readline(_WINDOW)) and not part.endswith(b"\n"):
                pass  # a huge line is not held in memory
            ends.add(lines.tell())
    return sorted(end for end in ends if end < file.size)


def _safe_cuts(file: SourceFile, bounds: Sequence[int], tokenizer: TokenizerSpec) -> list[int]:
    """Where a text can be cut after each of `bounds`; none where the window holds no such place."""
    if not bounds:
        return []
    cuts: set[int] = set()
    ids = tokenizer.ids()
    with open(file.path, "rb") as text:
        for bound in bounds:
            text.seek(first := max(0, bound - CONTEXT))
            window = text.read(_WINDOW + 2 * CONTEXT)
            cut = find_cut(window, bound - first, len(window) - CONTEXT, ids)
            if cut is not None and first + cut < file.size:
                cuts.add(first + cut)
    return sorted(cuts)


class UnitOrigin:
    """Gathers what the index says about where a unit came from, piece by piece."""

    def __init__(self, text_key: str) -> None:
        self._text_key = text_key
        self._files: dict[Path, str] = {}
        self._digest = xxh3_128()

    @contextmanager
    def opened(
        self, piece: Piece, on_bytes: Callable[[int], None] = lambda count: None
    ) -> Iterator[BinaryIO]:
        """The next piece, unpacked; it counts in full, also what the block does not read.
        `on_bytes` is called with numbers of bytes on disk. Raises DataError, also in the block, if
        they cannot be read, are no longer all there or cannot be unpacked."""
        path = piece.file.path
        self._files[path] = piece.file.name
        key = None if piece.file.one_document else self._text_key
        identity = [piece.file.name, piece.start, piece.stop, piece.ends_document, key]
        self._digest.update(json.dumps(identity).encode())
        try:
            with open(path, "rb", buffering=0) as file:
                raw = io.BufferedReader(_SummedPiece(file, piece, self._digest, on_bytes), _BUFFER)
                with open_packed(cast(BinaryIO, raw), piece.file.packing, path) as stream:
                    yield stream
                while raw.read(_BUFFER):
                    pass
        except UnpackError as error:
            raise DataError(f"{path} {error}") from error

    def source(self) -> ShardSource:
        first = next(iter(self._files.values()))
        return ShardSource(first=first, files=len(self._files), digest=self._digest.hexdigest())


class _SummedPiece(io.RawIOBase):
    """The bytes of one piece, summed as they are read."""

    def __init__(
        self, file: io.FileIO, piece: Piece, digest: Any, on_bytes: Callable[[int], None]
    ) -> None:
        self._file, self._piece = file, piece
        self._digest, self._on_bytes = digest, on_bytes
        self._left = piece.size
        with _named(piece.file.path):
            if os.fstat(file.fileno()).st_size != piece.file.size:
                raise _changed(piece.file.path)
            file.seek(piece.start)

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        part = memoryview(buffer)[: self._left]
        with _named(self._piece.file.path):
            count = self._file.readinto(part) if part else 0
        if part and not count:
            raise _changed(self._piece.file.path)
        self._digest.update(part[:count])
        self._left -= count
        self._on_bytes(count)
        return count


@contextmanager
def _named(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise cannot_read(path, error) from error


def _changed(path: Path) -> DataError:
    return DataError(f"{path} changed while it was being prepared: run the same command again")


def describe_unit(unit: Unit, text_key: str) -> ShardSource:
    """What the index says about the origin of a unit as it is now; reads all of it."""
    origin = UnitOrigin(text_key)
    for piece in unit.pieces:
        with origin.opened(piece):
            pass
    return origin.source()


def text_before(piece: Piece, length: int) -> bytes:
    """At most `length` bytes of the file that come before a piece; DataError as for the piece."""
    first = max(0, piece.start - length)
    with _named(piece.file.path), open(piece.file.path, "rb") as file:
        file.seek(first)
        return file.read(piece.start - first)


def line_number(piece: Piece, offset: int) -> int:
    """The number, from 1, of the line at a byte of the piece's file, unpacked."""
    whole = Piece(piece.file, 0, piece.file.size)
    lines_before, left = 0, offset
    with UnitOrigin("").opened(whole) as stream:
        while left and (block := stream.read(min(_BUFFER, left))):
            lines_before += block.count(b"\n")
            left -= len(block)
    return lines_before + 1
