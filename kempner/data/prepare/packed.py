"""Reads .gz and .zst as streams, in bounded memory."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, BinaryIO, cast

from kempner.run.process.exit_codes import UsageError

_BLOCK = 16 * 2**10  # of packed bytes; what one such block unpacks to is in memory
_DAMAGED = "cannot be unpacked: it is damaged, cut off, or not what its name says"


class UnpackError(Exception):
    """A packed file is damaged; a clause that follows the file's name."""


def required(module: str, path: Path) -> Any:
    """An optional package that reads `path`. UsageError with what to install if it is missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise UsageError(
            f"{path} needs the package {package}: pip install 'kempner[prepare]'"
        ) from error


@contextmanager
def open_packed(raw: BinaryIO, packing: str, path: Path) -> Iterator[BinaryIO]:
    """The content of `raw`, unpacked while it is read.

    Raises UnpackError, also in the block, if it is damaged; UsageError if a package is missing.
    """
    if not packing:
        yield raw
        return
    try:
        if packing == ".gz":
            yield cast(BinaryIO, gzip.GzipFile(fileobj=raw))
        else:
            yield cast(BinaryIO, io.BufferedReader(_Zstandard(raw, path), 2**18))
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise UnpackError(_DAMAGED) from error


class _Zstandard(io.RawIOBase):
    """One frame after the other; unlike the package's own reader, it notices a missing end."""

    def __init__(self, raw: BinaryIO, path: Path) -> None:
        self._raw = raw
        self._package = required("zstandard", path)
        self._frame: Any = None
        self._packed = b""
        self._unpacked = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._unpacked and self._unpack():
            pass
        count = min(len(buffer), len(self._unpacked))
        buffer[:count] = self._unpacked[:count]
        self._unpacked = self._unpacked[count:]
        return count

    def _unpack(self) -> bool:
        """Unpack the next block; whether there was one."""
        self._packed = self._packed or self._raw.read(_BLOCK)
        if not self._packed:
            if self._frame is not None:
                raise UnpackError(_DAMAGED)
            return False
        if self._frame is None:
            self._frame = self._package.ZstdDecompressor().decompressobj()
        try:
            self._unpacked = memoryview(self._frame.decompress(self._packed))
        except self._package.ZstdError as error:
            raise UnpackError(_DAMAGED) from error
        self._packed = b""
        if self._frame.eof:
            self._packed, self._frame = self._frame.unused_data, None
        return True
