"""Lines that are no text: left out and counted, up to a share of all."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from kempner.data.prepare.pieces import line_number
from kempner.data.prepare.sources import Piece
from kempner.run.process.exit_codes import DataError

_HOPELESS = 100


@dataclass(frozen=True)
class BadLine:
    """Where a line (a row of parquet) is, and what is wrong with it."""

    piece: Piece
    offset: int
    """Byte of the file, unpacked, or number of the row from 1."""
    reason: str

    def __str__(self) -> str:
        """File, line and reason; reads the file up to that line to count."""
        path = self.piece.file.path
        if self.piece.file.format == "parquet":
            return f"{path}, row {self.offset}: {self.reason}"
        return f"{path}:{line_number(self.piece, self.offset)}: {self.reason}"


class Tally:
    """Counts the lines of a unit, the bad ones, and remembers the first."""

    def __init__(self) -> None:
        self.lines = 0
        self.bad = 0
        self.first: BadLine | None = None
        self._piece: tuple[Piece, int, int] | None = None

    def start(self, piece: Piece) -> None:
        """The lines of another piece follow."""
        self._piece = piece, self.lines, self.bad

    def add_good(self, lines: int = 1) -> None:
        """Lines that can be used."""
        self.lines += lines

    def add_bad(self, offset: int, reason: str) -> None:
        """A line that is left out.

        Raises DataError if not one of the first hundred of the piece can be used: the file is of
        another kind than its name says.
        """
        assert self._piece is not None
        piece, lines_before, bad_before = self._piece
        self.lines += 1
        self.bad += 1
        here = BadLine(piece, offset, reason)
        self.first = self.first or here
        lines = self.lines - lines_before
        if lines == self.bad - bad_before == _HOPELESS:
            raise DataError(f"{here}; none of the {lines} lines up to it can be used")


@dataclass(frozen=True)
class BadLines:
    """The bad lines of all units together."""

    lines: int
    bad: int
    first: BadLine | None


def added_up(counts: Iterable[BadLines]) -> BadLines:
    """The sum of what was counted in each unit, in order."""
    lines = bad = 0
    first = None
    for count in counts:
        lines, bad = lines + count.lines, bad + count.bad
        first = first or count.first
    return BadLines(lines, bad, first)


def check_share(counted: BadLines, allowed: float) -> None:
    """DataError if more than that share of the lines is bad."""
    if counted.first is not None and counted.bad > allowed * counted.lines:
        raise DataError(
            f"{counted.first}; {counted.bad:,} of {counted.lines:,} lines cannot be used, more "
            f"than the share of {allowed:g} that --max-bad-share allows: mend the text, or allow "
            "more; finished files are kept"
        )
