"""Reads ranges of a data file, verifying the checksum of every block that they touch."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import numpy as np
import xxhash

from kempner.checkpoint.format.manifest import FileEntry, FileSums, decode_sidecar, whole_sum
from kempner.checkpoint.io.patient_reads import read_listed
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import empty, read_filled

T = TypeVar("T")


@dataclass(frozen=True)
class MemoryCopy:
    """What may be the content of a file, in shared memory from `start` on."""

    descriptor: int
    start: int
    bytes: int


class VerifiedFile:
    """One data file of a checkpoint, with the checksums of its blocks.

    With a copy in `memory`, blocks are read from there as long as they match their checksums.
    """

    def __init__(
        self,
        path: Path,
        entry: FileEntry,
        files: Mapping[str, FileEntry],
        memory: MemoryCopy | None = None,
    ) -> None:
        """Read the checksums; raises `DataError` if they are not as the manifest says."""
        self.path = path
        self.block_bytes, self.sums = _sums_of(path, entry, files)
        self.memory = memory if memory is not None and memory.bytes == self.sums.bytes else None

    @property
    def name(self) -> str:
        return self.path.name


class Cursor:
    """One thread's way through a file: ranges in ascending order share blocks, read once.

    The file is open from the first read to `close`, and opened anew where it cannot be read: so
    many files are open at once as threads read. Memory is used again from read to read: fresh pages
    cost more than reading into them.
    """

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file
        self._descriptor: int | None = None
        self._buffer = memoryview(bytearray())
        self._first = self._last = 0  # the blocks that the buffer holds
        self.bytes_read = self.bytes_from_memory = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):  # of a server that has forgotten it
                os.close(descriptor)

    def peek(self, start: int, length: int) -> bytes:
        """Bytes as they are on disk, unchecked: for what is read and checked, too."""
        if self._file.memory is not None:
            return bytes(self.read(start, min(start + length, self._file.sums.bytes)))
        return self._read(lambda descriptor: os.pread(descriptor, length, start))

    def fill(self, content: memoryview, first: int) -> None:
        """Read whole blocks from block `first` on into `content`, and check each.

        Raises `DataError`, naming the block, if one is not what was written, and as
        `StorageWaits.retry` where it cannot be read now.
        """
        file, start = self._file, first * self._file.block_bytes
        if file.memory is not None:
            if self._is_remembered(file.memory, content, first):
                self.bytes_from_memory += len(content)
                return
            file.memory = None
        self._read(lambda descriptor: self._pour(descriptor, content, start))
        if (number := self._damaged(content, first)) is not None:
            raise DataError(
                f"{file.name}: block {number} (from byte {number * file.block_bytes}) "
                "does not match its checksum"
            )

    def _is_remembered(self, memory: MemoryCopy, content: memoryview, first: int) -> bool:
        """Whether these blocks are in memory, by their checksums; they are in `content`, then."""
        start = memory.start + first * self._file.block_bytes
        count = os.preadv(memory.descriptor, [content], start)
        return count == len(content) and self._damaged(content, first) is None

    def _damaged(self, content: memoryview, first: int) -> int | None:
        """The first block, from number `first` on, that is not what was written."""
        size, sums = self._file.block_bytes, self._file.sums.blocks
        for number, begin in enumerate(range(0, len(content), size), first):
            if xxhash.xxh3_64_hexdigest(content[begin : begin + size]) != sums[number]:
                return number
        return None

    def _read(self, work: Callable[[int], T]) -> T:
        """Do `work` on the open file, and again on one opened anew."""

        def once() -> T:
            try:
                return work(self._open())
            except BaseException:
                self.close()
                raise

        try:
            return read_listed(self._file.path, once)
        except DataError as error:
            raise DataError(f"{self._file.name} {error}") from error

    def _open(self) -> int:
        if self._descriptor is None:
            self._descriptor = os.open(self._file.path, os.O_RDONLY | os.O_CLOEXEC)
            length, expected = os.fstat(self._descriptor).st_size, self._file.sums.bytes
            if expected and not length:
                raise empty(self._file.path, expected)
            if length != expected:
                raise DataError(f"has {length} bytes instead of {expected}")
        return self._descriptor

    def _pour(self, descriptor: int, content: memoryview, start: int) -> None:
        done = 0
        while done < len(content):
            count = os.preadv(descriptor, [content[done:]], start + done)
            if count == 0:
                self.close()
                self._open()  # which says what has become of it
                raise OSError(errno.EIO, f"nothing was read at byte {start + done}")
            done += count

    def read(self, start: int, end: int) -> memoryview:
        """The bytes from `start` up to `end`, checked; valid until the next read."""
        size = self._file.block_bytes
        first, last = start // size, -(-end // size)
        if not self._first <= first < last <= self._last:
            self._hold(first, last)
        at = self._first * size
        return self._buffer[start - at : end - at]

    def _hold(self, first: int, last: int) -> None:
        """Have the blocks from `first` up to `last` in the buffer; keep what is there already."""
        size = self._file.block_bytes
        length = min(last * size, self._file.sums.bytes) - first * size
        kept = self._buffer[:0]
        if self._first <= first < self._last:
            held = min(self._last * size, self._file.sums.bytes) - self._first * size
            kept = self._buffer[(first - self._first) * size : held]
        buffer = self._buffer
        if len(buffer) < length:
            buffer = np.empty(length, np.uint8).data
        buffer[: len(kept)] = kept
        missing = buffer[len(kept) : length]
        self.fill(missing, first + len(kept) // size)
        self.bytes_read += len(missing)
        self._buffer, self._first, self._last = buffer, first, last


def _sums_of(path: Path, entry: FileEntry, files: Mapping[str, FileEntry]) -> tuple[int, FileSums]:
    if entry.sums is None or entry.sums not in files:
        raise DataError(f"{path.name} has no block checksums in the manifest")
    sidecar = path.with_name(entry.sums)
    try:
        content = read_listed(sidecar, partial(read_filled, sidecar))
    except DataError as error:
        raise DataError(f"{sidecar.name} {error}") from error
    if whole_sum(content) != files[entry.sums].xxh3_128:
        raise DataError(f"{sidecar.name}: checksum does not match")
    block_bytes, sums = decode_sidecar(content, sidecar)
    if path.name not in sums or sums[path.name].bytes != entry.bytes:
        raise DataError(f"{sidecar.name} does not list {path.name}")
    return block_bytes, sums[path.name]
