"""Splits the input files into units of work: which bytes make which token file.

The units depend on the files and on the tokenizer, never on the number of workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from kempner.data.prepare.inputs import SourceFile
from kempner.data.prepare.long_text import CONTEXT, find_cut
from kempner.data.prepare.parquet import row_groups
from kempner.data.prepare.tokenizers import TokenizerSpec
from kempner.run.process.exit_codes import DataError

# A change of these cuts the same files into other shards, which gives them another fingerprint.
_UNIT = 8 * 2**20
_MOST_UNITS = 1024
_LARGEST_PIECE = 64 * 2**20
_WINDOW = 64 * 2**10


@dataclass(frozen=True)
class Piece:
    """The bytes [start, stop) of a file, as they are on disk."""

    file: SourceFile
    start: int
    stop: int

    @property
    def size(self) -> int:
        """In bytes."""
        return self.stop - self.start

    @property
    def ends_document(self) -> bool:
        """Whether a document ends with the piece (lines and rows end theirs by themselves)."""
        return not self.file.one_document or self.stop == self.file.size


@dataclass(frozen=True)
class Unit:
    """What becomes one token file."""

    number: int
    pieces: tuple[Piece, ...]

    @property
    def shard_file(self) -> str:
        """Name of the token file."""
        return f"shard-{self.number:05d}.tokens"

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return sum(piece.size for piece in self.pieces)


def plan_units(
    files: Sequence[SourceFile], tokenizer: TokenizerSpec, text_key: str
) -> tuple[Unit, ...]:
    """Cut large files into pieces and gather small ones, so that shards are few but not huge.

    Lines stay whole, and a text is cut only where that changes no token; a packed file is one
    piece. Raises DataError if a file cannot be read, UsageError if a table has no such column.
    """
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
    return (*units, Unit(len(units), tuple(gathered)))


def _cut(file: SourceFile, length: int, tokenizer: TokenizerSpec, text_key: str) -> list[Piece]:
    bounds = list(range(length, file.size, length))
    try:
        if file.format == "parquet":
            starts = row_groups(file.path, text_key)
            bounds = _first_at_or_after(bounds, starts)
        elif file.packing:
            bounds = []
        elif file.format == "jsonl":
            bounds = _line_ends(file, bounds)
        elif not tokenizer.splits_anywhere:
            bounds = _safe_cuts(file, bounds, tokenizer)
    except OSError as error:
        raise DataError(f"{file.path} cannot be read: {error.strerror}") from error
    edges = [0, *bounds, file.size]
    return [Piece(file, start, stop) for start, stop in pairwise(edges)]


def _first_at_or_after(bounds: Sequence[int], starts: Sequence[int]) -> list[int]:
    found = {next((start for start in starts if start >= bound), 0) for bound in bounds}
    return sorted(found - {0})


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
