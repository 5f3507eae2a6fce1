"""Splits the input files into units of work: which bytes make which token file.

The units depend on the files and on the tokenizer, never on the number of workers.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BytesIO
from itertools import pairwise
from pathlib import Path

from xxhash import xxh3_128

from kempner.data.files.index import Source
from kempner.run.process.exit_codes import DataError, UsageError, cannot_read

_JSONL = frozenset({".jsonl"})
_TEXT = frozenset({".txt", ".text", ".md"})
_NOT_TEXT = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".parquet", ".arrow"})

# A change of these cuts the same files into other shards, which gives them another fingerprint.
_UNIT = 8 * 2**20
_MOST_UNITS = 1024
_LARGEST_PIECE = 64 * 2**20

_BLOCK = 2**20


@dataclass(frozen=True)
class SourceFile:
    """A file to prepare. Its name is what remains of it in the index: without the folder."""

    path: Path
    name: str
    size: int

    @property
    def is_jsonl(self) -> bool:
        """One document a line, rather than one in the whole file."""
        return self.path.suffix in _JSONL


@dataclass(frozen=True)
class Piece:
    """The bytes [start, stop) of a file."""

    file: SourceFile
    start: int
    stop: int

    @property
    def ends_document(self) -> bool:
        """Whether a document ends with the piece (lines end theirs by themselves)."""
        return self.file.is_jsonl or self.stop == self.file.size


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
        """Bytes of text."""
        return sum(piece.stop - piece.start for piece in self.pieces)


@dataclass(frozen=True)
class Found:
    """The files to prepare, in order, and those in the folders that are no text."""

    files: tuple[SourceFile, ...]
    left_out: tuple[Path, ...]


def find_files(named: Sequence[Path]) -> Found:
    """The named files and, sorted by name, the text files below the named folders.

    Links to folders are not followed. Raises UsageError, naming it, if something is missing, is no
    text or cannot be read, or a folder holds no text.
    """
    files: list[SourceFile] = []
    left_out: list[Path] = []
    try:
        for path in named:
            if path.is_dir():
                inside, others = _below(path)
                files += inside
                left_out += others
            else:
                files.append(_named_file(path))
    except OSError as error:
        raise cannot_read(error.filename, error) from error
    if not sum(file.size for file in files):
        raise UsageError(f"there is no text in {', '.join(map(str, named))}: nothing to prepare")
    return Found(tuple(files), tuple(left_out))


def _named_file(path: Path) -> SourceFile:
    if not path.exists():
        raise UsageError(f"{path} does not exist: name text files, .jsonl files or folders of them")
    if not path.is_file():
        raise UsageError(f"{path} is neither a file nor a folder")
    if path.suffix in _NOT_TEXT:
        raise UsageError(f"{path} is not plain text: unpack or convert it first")
    return _source(path, path.name)


def _below(folder: Path) -> tuple[list[SourceFile], list[Path]]:
    """The text files below a folder, sorted by name, and what else is there."""
    wanted: list[tuple[str, Path]] = []
    left_out: list[Path] = []
    for root, folders, names in os.walk(folder, onerror=_refuse_to_skip):
        left_out += [path for name in folders if (path := Path(root, name)).is_symlink()]
        for path in (Path(root, name) for name in names):
            if path.suffix in _TEXT | _JSONL and path.is_file():
                wanted.append((path.relative_to(folder).as_posix(), path))
            else:
                left_out.append(path)
    if not wanted:
        endings = ", ".join(sorted(_TEXT | _JSONL))
        raise UsageError(f"folder {folder} contains no text file ({endings}): name the files")
    return [_source(path, name) for name, path in sorted(wanted)], sorted(left_out)


def _refuse_to_skip(error: OSError) -> None:
    raise error  # os.walk would silently skip the folder


def _source(path: Path, name: str) -> SourceFile:
    # The name goes into JSON, which holds no bytes that are not text.
    return SourceFile(
        path, os.fsencode(name).decode(errors="backslashreplace"), path.stat().st_size
    )


def plan_units(files: Sequence[SourceFile], *, split_texts: bool) -> tuple[Unit, ...]:
    """Cut large files into pieces and gather small ones, so that shards are few but not huge.

    Lines stay whole; texts too, unless `split_texts`. Raises DataError if a file cannot be read.
    """
    target = max(_UNIT, -(-sum(file.size for file in files) // _MOST_UNITS))
    units: list[Unit] = []
    gathered: list[Piece] = []
    size = 0
    for file in files:
        for piece in _cut(file, min(target, _LARGEST_PIECE), split_texts):
            length = piece.stop - piece.start
            if gathered and size + length > target:
                units.append(Unit(len(units), tuple(gathered)))
                gathered, size = [], 0
            gathered.append(piece)
            size += length
    return (*units, Unit(len(units), tuple(gathered)))


def _cut(file: SourceFile, length: int, split_texts: bool) -> list[Piece]:
    bounds = list(range(length, file.size, length))
    if file.is_jsonl:
        bounds = _line_ends(file, bounds)
    elif not split_texts:
        bounds = []
    edges = [0, *bounds, file.size]
    return [Piece(file, start, stop) for start, stop in pairwise(edges)]


def _line_ends(file: SourceFile, bounds: Sequence[int]) -> list[int]:
    """The first end of a line at or after each of `bounds`, short of the end of the file."""
    ends: set[int] = set()
    try:
        with open(file.path, "rb") as lines:
            for bound in bounds:
                lines.seek(bound - 1)
                lines.readline()
                ends.add(lines.tell())
    except OSError as error:
        raise cannot_read(file.path, error) from error
    return sorted(end for end in ends if end < file.size)


def read_piece(piece: Piece) -> bytes:
    """The bytes of a piece. DataError if they cannot be read or are no longer all there."""
    path = piece.file.path
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == piece.file.size:
                file.seek(piece.start)
                content = file.read(piece.stop - piece.start)
                if len(content) == piece.stop - piece.start:
                    return content
    except OSError as error:
        raise cannot_read(path, error) from error
    raise DataError(f"{path} changed while it was being prepared: run the same command again")


class Origin:
    """Gathers what the index says about where a unit came from, piece by piece."""

    def __init__(self, text_key: str) -> None:
        self._text_key = text_key
        self._files: dict[Path, str] = {}
        self._digest = xxh3_128()

    def add(self, piece: Piece, content: bytes) -> None:
        """The next piece, and its bytes."""
        self._files[piece.file.path] = piece.file.name
        key = self._text_key if piece.file.is_jsonl else None
        identity = [piece.file.name, piece.start, piece.stop, piece.ends_document, key]
        self._digest.update(json.dumps(identity).encode())
        self._digest.update(content)

    def source(self) -> Source:
        """Of all pieces so far."""
        first = next(iter(self._files.values()))
        return Source(first=first, files=len(self._files), digest=self._digest.hexdigest())


def describe_unit(unit: Unit, text_key: str) -> Source:
    """What the index says about the origin of a unit as it is now; reads all of it."""
    origin = Origin(text_key)
    for piece in unit.pieces:
        origin.add(piece, read_piece(piece))
    return origin.source()


def documents(piece: Piece, content: bytes, text_key: str) -> Iterator[bytes]:
    """The documents of a piece (of a text that was cut: its part of one), as UTF-8 where known.

    Raises DataError, naming file and line, if a line is no JSON object with a text in `text_key`.
    """
    if not piece.file.is_jsonl:
        yield content
        return
    offset = piece.start
    for line in BytesIO(content):
        if line.strip():
            try:
                yield _text_of(line, text_key)
            except ValueError as error:
                number = _line_number(piece.file.path, offset)
                raise DataError(f"{piece.file.path}:{number}: {error}") from error
        offset += len(line)


def _text_of(line: bytes, text_key: str) -> bytes:
    """The UTF-8 text of one line of JSON; ValueError with a clause that says what is wrong."""
    try:
        record = json.loads(line.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(f"the line is not UTF-8 (at its byte {error.start + 1})") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"the line is not JSON ({error.msg}, column {error.colno})") from error
    except RecursionError as error:
        raise ValueError("the line is nested too deeply") from error
    if not isinstance(record, dict):
        raise ValueError(f"the line is a JSON {type(record).__name__}, not an object")
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


def _line_number(path: Path, offset: int) -> int:
    """The number, counted from 1, of the line that starts at a byte of a file."""
    lines_before = 0
    with open(path, "rb") as file:
        while block := file.read(min(_BLOCK, offset - file.tell())):
            lines_before += block.count(b"\n")
    return lines_before + 1
