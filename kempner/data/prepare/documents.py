"""Takes the documents out of a piece of a file.

Lines that hold no text are left out and counted, up to a share of all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, BinaryIO, TypeVar

from kempner.data.prepare.packed import Item, records, texts
from kempner.data.prepare.sources import Piece, line_number
from kempner.run.process.exit_codes import DataError

LONGEST_LINE = 16 * 2**20
"""Bytes of a line of JSONL or a row of parquet; a longer one is bad. A .txt has no limit."""

_BLOCK = 256 * 2**10
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_TOO_LONG = f"the document is longer than {LONGEST_LINE // 2**20} MiB; make it a .txt file"

Taken = TypeVar("Taken")
Parts = Iterator[tuple[bytes, bool]]  # parts of documents, and whether one ends with the part


_HOPELESS = 100  # bad lines at the beginning of a piece


@dataclass(frozen=True)
class BadLine:
    """Where a line (a row of parquet) is, and what is wrong with it."""

    piece: Piece
    offset: int  # byte of the file, unpacked, or number of the row from 1
    reason: str

    def __str__(self) -> str:
        """File, line and reason; reads the file up to that line to count."""
        path = self.piece.file.path
        if self.piece.file.format == "parquet":
            return f"{path}, row {self.offset}: {self.reason}"
        return f"{path}:{line_number(self.piece, self.offset)}: {self.reason}"


@dataclass
class Tally:
    """Counts lines, the bad ones, and remembers the first of those."""

    lines: int = 0
    bad: int = 0
    first: BadLine | None = None
    _piece: tuple[Piece, int, int] | None = None

    def start(self, piece: Piece) -> None:
        self._piece = piece, self.lines, self.bad

    def add_good(self, lines: int = 1) -> None:
        self.lines += lines

    def add_bad(self, offset: int, reason: str) -> None:
        """A line that is left out. Raises DataError if not one of the first hundred of the piece
        can be used: the file is of another kind than its name says."""
        assert self._piece is not None
        piece, lines_before, bad_before = self._piece
        self.lines += 1
        self.bad += 1
        here = BadLine(piece, offset, reason)
        self.first = self.first or here
        lines = self.lines - lines_before
        if lines == self.bad - bad_before == _HOPELESS:
            raise DataError(f"{here}; none of the {lines} lines up to it can be used")


def added_up(counts: Iterable[Tally]) -> Tally:
    total = Tally()
    for count in counts:
        total.lines, total.bad = total.lines + count.lines, total.bad + count.bad
        total.first = total.first or count.first
    return total


def check_share(counted: Tally, allowed: float) -> None:
    """DataError if more than that share of the lines is bad."""
    if counted.first is not None and counted.bad > allowed * counted.lines:
        raise DataError(
            f"{counted.first}; {counted.bad:,} of {counted.lines:,} lines cannot be used, more "
            f"than the share of {allowed:g} that --max-bad-share allows: mend the text, or allow "
            "more; finished files are kept"
        )


def text_parts(piece: Piece, stream: BinaryIO, tally: Tally, *, utf8: bool) -> Parts:
    """A file, or a piece of it, as parts of one document, in whole characters if `utf8`. Lines that
    are not UTF-8 are bad then; otherwise any bytes will do."""
    tally.start(piece)
    offset = piece.start
    for block in _blocks(stream):
        content = block.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else block
        skipped = len(block) - len(content)
        yield (_only_utf8(content, offset + skipped, tally) if utf8 else content), False
        offset += len(block)
    yield b"", piece.ends_document


def _blocks(stream: BinaryIO) -> Iterator[bytes]:
    """Blocks that end with a line, or at least, where a line is long, with a character."""
    carried = b""
    while block := stream.read(_BLOCK):
        block = carried + block
        end = block.rfind(b"\n") + 1 or _end_of_character(block)
        carried = block[end:]
        if end:
            yield block[:end]
    if carried:
        yield carried


def _end_of_character(block: bytes) -> int:
    """Where the last character begins, if it may be cut off."""
    for back in range(1, min(4, len(block)) + 1):
        if block[-back] & 0xC0 == 0xC0:
            return len(block) - back
        if not block[-back] & 0x80:
            break
    return len(block)


def _only_utf8(content: bytes, offset: int, tally: Tally) -> bytes:
    try:
        content.decode("utf-8")
    except UnicodeDecodeError:
        return b"".join(_good_lines(content, offset, tally))
    tally.add_good(max(1, content.count(b"\n")))
    return content


def _good_lines(content: bytes, offset: int, tally: Tally) -> Iterator[bytes]:
    for line in BytesIO(content):
        try:
            line.decode("utf-8")
        except UnicodeDecodeError as error:
            tally.add_bad(offset, f"{_not_utf8(error)}; --tokenizer byte takes any bytes")
        else:
            tally.add_good()
            yield line
        offset += len(line)


def _not_utf8(error: UnicodeDecodeError) -> str:
    return f"the line is not UTF-8 (at its byte {error.start + 1})"


def line_parts(piece: Piece, stream: BinaryIO, tally: Tally, text_key: str) -> Parts:
    """The texts of lines of JSON, as UTF-8; each is a document."""
    for text in line_records(piece, stream, tally, partial(_text_of, text_key=text_key)):
        yield text, True


def line_records(
    piece: Piece, stream: BinaryIO, tally: Tally, take: Callable[[dict[str, Any]], Taken]
) -> Iterator[Taken]:
    """What `take` makes of the objects of lines of JSON; it raises `ValueError`, a clause, for an
    object of which nothing can be made."""
    tally.start(piece)
    offset = piece.start
    while line := stream.readline(LONGEST_LINE + 1):
        size = len(line)
        if size > LONGEST_LINE:
            size += _skip_line(stream) if not line.endswith(b"\n") else 0
            tally.add_bad(offset, _TOO_LONG)
        elif line.strip():
            content = line.removeprefix(_BYTE_ORDER_MARK) if offset == 0 else line
            try:
                taken = take(_object_of(content))
            except ValueError as error:
                tally.add_bad(offset, str(error))
            else:
                tally.add_good()
                yield taken
        offset += size


def _skip_line(stream: BinaryIO) -> int:
    """Read on to the end of the line; the number of bytes."""
    skipped = 0
    while part := stream.readline(_BLOCK):
        skipped += len(part)
        if part.endswith(b"\n"):
            break
    return skipped


def _object_of(line: bytes) -> dict[str, Any]:
    """The object of one line of JSON; ValueError with a clause that says what is wrong."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(_not_utf8(error)) from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"the line is a JSON {type(record).__name__}, not an object")
    return record


def _text_of(record: dict[str, Any], text_key: str) -> bytes:
    """The UTF-8 text of an object; ValueError with a clause that says what is wrong."""
    if text_key not in record:
        keys = ", ".join(record) or "none"
        raise ValueError(f'the object has no key "{text_key}" (it has: {keys}); see --text-key')
    text = record[text_key]
    if not isinstance(text, str):
        raise ValueError(f'the value of "{text_key}" is not a string')
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(f'"{text_key}" has half a surrogate pair, which is not text') from error


def row_parts(piece: Piece, tally: Tally, text_key: str, on_bytes: Callable[[int], None]) -> Parts:
    """The texts of a parquet file's rows; each is a document. Raises as `parquet.texts`."""
    rows = texts(piece.file.path, text_key, piece.start, piece.stop)
    for text in _good_rows(piece, rows, tally, partial(_text_of_row, text_key=text_key), on_bytes):
        yield text, True


def row_records(
    piece: Piece,
    tally: Tally,
    keys: Sequence[str],
    take: Callable[[dict[str, Any]], Taken],
    on_bytes: Callable[[int], None],
) -> Iterator[Taken]:
    """What `take` makes of the columns `keys` of a parquet file's rows, as `line_records`."""
    rows = records(piece.file.path, keys, piece.start, piece.stop)
    return _good_rows(piece, rows, tally, take, on_bytes)


def _good_rows(
    piece: Piece,
    rows: Iterable[tuple[int, float, Item]],
    tally: Tally,
    take: Callable[[Item], Taken],
    on_bytes: Callable[[int], None],
) -> Iterator[Taken]:
    tally.start(piece)
    reported_bytes = 0
    for row, share, item in rows:
        try:
            taken = take(item)
        except ValueError as error:
            tally.add_bad(row, str(error))
        else:
            tally.add_good()
            yield taken
        on_bytes(int(share * piece.size) - reported_bytes)
        reported_bytes = int(share * piece.size)


def _text_of_row(text: bytes | None, text_key: str) -> bytes:
    if text is None:
        raise ValueError(f'the value of "{text_key}" is null')
    if len(text) > LONGEST_LINE:
        raise ValueError(_TOO_LONG)
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"the text is not UTF-8 (at its byte {error.start + 1})") from error
    return text
