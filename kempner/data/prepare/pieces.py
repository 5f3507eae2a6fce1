"""Reads the pieces of files as streams, and sums what was read."""

from __future__ import annotations

import io
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from xxhash import xxh3_128

from kempner.data.files.index import ShardSource
from kempner.data.prepare.packed import UnpackError, open_packed
from kempner.data.prepare.sources import Piece, Unit
from kempner.run.process.exit_codes import DataError, cannot_read

_BUFFER = 256 * 2**10


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
        they cannot be read, are no longer all there or cannot be unpacked.
        """
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
        """Of all pieces so far."""
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
