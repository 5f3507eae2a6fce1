"""Reads ranges of a data file, verifying the checksum of every block that they touch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import xxhash

from kempner.checkpoint.format.manifest import FileEntry, FileSums, decode_sidecar, whole_sum
from kempner.run.process.exit_codes import DataError


class VerifiedFile:
    """One data file of a checkpoint, open for reading, with the checksums of its blocks."""

    def __init__(self, path: Path, entry: FileEntry, files: Mapping[str, FileEntry]) -> None:
        """Open `path`; raises `DataError` if it or its sidecar is not as the manifest says."""
        self.name = path.name
        self.block_bytes, self.sums = _sums_of(path, entry, files)
        try:
            self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise DataError(f"{path.name} cannot be read: {error.strerror}") from error
        length = os.fstat(self._descriptor).st_size
        if length != entry.bytes:
            self.close()
            raise DataError(f"{path.name} has {length} bytes instead of {entry.bytes}")

    def peek(self, start: int, length: int) -> bytes:
        """Bytes as they are on disk, unchecked: for what is read and checked, too."""
        return os.pread(self._descriptor, length, start)

    def fill(self, content: memoryview, first: int) -> None:
        """Read whole blocks from block `first` on into `content`, and check each.

        Raises `DataError`, naming the block, if one is not what was written.
        """
        start, done = first * self.block_bytes, 0
        while done < len(content):
            try:
                count = os.preadv(self._descriptor, [content[done:]], start + done)
            except OSError as error:
                raise DataError(
                    f"{self.name} cannot be read from byte {start + done}: {error.strerror}"
                ) from error
            if count == 0:
                raise DataError(f"{self.name} ends at byte {start + done}")
            done += count
        for number, begin in enumerate(range(0, len(content), self.block_bytes), first):
            block = content[begin : begin + self.block_bytes]
            if xxhash.xxh3_64_hexdigest(block) != self.sums.blocks[number]:
                raise DataError(
                    f"{self.name}: block {number} (from byte {number * self.block_bytes}) "
                    "does not match its checksum"
                )

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class Cursor:
    """One thread's way through a file: ranges in ascending order share blocks, read once.

    Memory is used again from read to read: fresh pages cost more than reading into them.
    """

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file
        self._buffer = memoryview(bytearray())
        self._first = self._last = 0  # the blocks that the buffer holds
        self.bytes_read = 0

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
        self._file.fill(missing, first + len(kept) // size)
        self.bytes_read += len(missing)
        self._buffer, self._first, self._last = buffer, first, last


def _sums_of(path: Path, entry: FileEntry, files: Mapping[str, FileEntry]) -> tuple[int, FileSums]:
    if entry.sums is None or entry.sums not in files:
        raise DataError(f"{path.name} has no block checksums in the manifest")
    sidecar = path.with_name(entry.sums)
    try:
        content = sidecar.read_bytes()
    except OSError as error:
        raise DataError(f"{sidecar.name} cannot be read: {error.strerror}") from error
    if whole_sum(content) != files[entry.sums].xxh3_128:
        raise DataError(f"{sidecar.name}: checksum does not match")
    block_bytes, sums = decode_sidecar(content, sidecar)
    if path.name not in sums or sums[path.name].bytes != entry.bytes:
        raise DataError(f"{sidecar.name} does not list {path.name}")
    return block_bytes, sums[path.name]
