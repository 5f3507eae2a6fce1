"""Reads the files that a manifest lists and verifies every byte, or ranges of data files block by
block; needs no torch.

Distinguishes a damaged file from one that cannot be read now, which is retried. Results of `verify`
are stored beside the checkpoints, one JSON object per line, by the digest of the manifest: so they
still apply after a rename, and never to another checkpoint of the same name."""

from __future__ import annotations

import errno
import json
import mmap
import os
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import xxhash

from kempner.checkpoint.format.manifest import (
    BLOCK_BYTES,
    FileEntry,
    FileSums,
    Manifest,
    decode_sidecar,
    digest,
    read,
    whole_sum,
)
from kempner.checkpoint.format.names import MANIFEST, VERIFIED
from kempner.run.process.durable_io import append_line
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import empty, storage_waits
from kempner.run.record.ledger import read_lines

T = TypeVar("T")

READERS = 4  # files that are read at the same time
OnRead = Callable[[int], None]  # called with the number of bytes just read; from several threads


@dataclass(frozen=True)
class Damage:
    """A damaged file, and a sentence that names the block if there is one."""

    file: str
    what: str

    def __str__(self) -> str:
        return f"{self.file}: {self.what}"


def verify(checkpoint: Path, on_read: OnRead = lambda count: None) -> list[Damage]:
    """All damages of a checkpoint; empty if every byte is as committed. Raises as
    `StorageWaits.retry` if it cannot be read now."""
    try:
        manifest = read(checkpoint)
    except DataError as error:
        return [Damage(MANIFEST, str(error))]
    interrupted = threading.Event()

    def check(name: str) -> list[Damage]:
        return [] if interrupted.is_set() else verify_files(checkpoint, manifest, [name], count)

    def count(length: int) -> None:
        if interrupted.is_set():
            raise DataError("was not read completely")
        on_read(length)

    with ThreadPoolExecutor(READERS, "verifier") as pool:
        try:
            return [damage for found in pool.map(check, manifest.files) for damage in found]
        finally:
            interrupted.set()  # else Ctrl-C would wait for the files being read


def verify_files(
    checkpoint: Path, manifest: Manifest, names: Iterable[str], on_read: OnRead = lambda count: None
) -> list[Damage]:
    """Verify the named files against the manifest; ranks can share the reading. Raises as
    `StorageWaits.retry` if one cannot be read now, which is no damage."""
    damages: list[Damage] = []
    for name in names:
        path, entry = checkpoint / name, manifest.files.get(name)
        try:
            if entry is None:
                raise DataError("is not in the manifest")
            if entry.sums is not None:
                _check_blocks(VerifiedFile(path, entry, manifest.files), on_read)
            elif read_listed(path, partial(_sum_whole, path, entry, on_read)) != entry.xxh3_128:
                raise DataError("checksum does not match")
        except DataError as error:
            damages.append(Damage(name, str(error)))
    return damages


def read_listed(path: Path, work: Callable[[], T]) -> T:
    """The result of `work`, which reads a file listed in its checkpoint's manifest. Since the file
    existed when the manifest was written, it counts as missing only if the manifest is still
    visible beside it; else the folder is unavailable. Raises `DataError` if the file is missing or
    stays empty, and as `StorageWaits.retry` if it cannot be read now."""

    def once() -> T:
        try:
            return work()
        except FileNotFoundError as error:
            if os.access(path.with_name(MANIFEST), os.F_OK):
                raise DataError(f"cannot be read: {error.strerror}") from error
            raise

    try:
        return storage_waits().retry(once, worked=True, path=path)
    except OSError as error:
        words = "" if error.errno == errno.ENODATA else "cannot be read: "
        raise DataError(f"{words}{error.strerror}") from error


def read_checked(checkpoint: Path, manifest: Manifest, name: str) -> bytes | None:
    """The verified content of a checkpoint's file; None if there is none of that name. Raises
    `DataError` if it is damaged, and as `StorageWaits.retry`."""
    entry = manifest.files.get(name)
    if entry is None:
        return None
    for damage in verify_files(checkpoint, manifest, [name]):
        raise DataError(str(damage))
    return read_listed(checkpoint / name, partial(_read_whole, checkpoint / name, entry))


def read_whole(path: Path, entry: FileEntry) -> bytes:
    """The content of a small file with a single checksum. Raises `DataError` if it is damaged."""
    try:
        content = read_listed(path, partial(_read_whole, path, entry))
        _check_length(len(content), entry.bytes)
        if whole_sum(content) != entry.xxh3_128:
            raise DataError("checksum does not match")
    except DataError as error:
        raise DataError(f"{path.name}: {error}") from error
    return content


def _read_whole(path: Path, entry: FileEntry) -> bytes:
    content = path.read_bytes()
    if entry.bytes and not content:
        raise empty(path, entry.bytes)
    return content


def _sum_whole(path: Path, entry: FileEntry, on_read: OnRead) -> str:
    """The checksum of a file, read in blocks: `.metadata` may be hundreds of megabytes. Raises
    `OSError`."""
    total = xxhash.xxh3_128()
    with open(path, "rb") as file:
        _check_open_length(file.fileno(), path, entry.bytes)
        while block := file.read(BLOCK_BYTES):
            total.update(block)
            on_read(len(block))
    return total.hexdigest()


def _check_blocks(file: VerifiedFile, on_read: OnRead) -> None:
    """Verify all blocks of a file. Raises `DataError`, naming the first damaged one."""
    damaged = read_listed(file.path, partial(_damaged_blocks, file, on_read))
    if damaged:
        more = f", and neither do {len(damaged) - 1} more blocks" if damaged[1:] else ""
        first, at = damaged[0], damaged[0] * file.block_bytes
        raise DataError(f"block {first} (from byte {at}) does not match its checksum{more}")


def _damaged_blocks(file: VerifiedFile, on_read: OnRead) -> list[int]:
    """The numbers of the damaged blocks. Raises `OSError` if the file cannot be read."""
    damaged = []
    with open(file.path, "rb") as opened:
        _check_open_length(opened.fileno(), file.path, file.sums.bytes)
        for number, expected in enumerate(file.sums.blocks):
            block = opened.read(file.block_bytes)
            if xxhash.xxh3_64_hexdigest(block) != expected:
                damaged.append(number)
            on_read(len(block))
    return damaged


def _check_open_length(descriptor: int, path: Path, expected: int) -> None:
    length = os.fstat(descriptor).st_size
    if expected and not length:
        raise empty(path, expected)
    _check_length(length, expected)


def _check_length(length: int, expected: int) -> None:
    if length != expected:
        raise DataError(f"has {length} bytes instead of {expected}")


@dataclass(frozen=True)
class MemoryCopy:
    """A possible copy of a file in shared memory, from `start`."""

    descriptor: int
    start: int
    bytes: int


class VerifiedFile:
    """A data file of a checkpoint, with its block checksums. With a copy in `memory`, blocks are
    read from there as long as they match."""

    def __init__(
        self,
        path: Path,
        entry: FileEntry,
        files: Mapping[str, FileEntry],
        memory: MemoryCopy | None = None,
    ) -> None:
        """Read the checksums. Raises `DataError` if they do not match the manifest."""
        self.path = path
        self.block_bytes, self.sums = _sums_of(path, entry, files)
        self.memory = memory if memory is not None and memory.bytes == self.sums.bytes else None

    @property
    def name(self) -> str:
        return self.path.name


class Cursor:
    """Reads ranges of a file in ascending order, in one thread; a block that two ranges share is
    read once. The file stays open from the first read to `close`, and is reopened after an error.
    The buffer is reused, since fresh pages cost more than reading into them."""

    def __init__(self, file: VerifiedFile) -> None:
        self._file = file
        self._descriptor: int | None = None
        self._buffer = memoryview(bytearray())
        self._first = self._last = 0  # the blocks that the buffer holds
        self.bytes_read = self.bytes_from_memory = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        if self._descriptor is not None:
            descriptor, self._descriptor = self._descriptor, None
            with suppress(OSError):  # a file server may have lost the handle
                os.close(descriptor)

    def peek(self, start: int, length: int) -> bytes:
        """Unverified bytes, for data that is also read and verified."""
        if self._file.memory is not None:
            return bytes(self.read(start, min(start + length, self._file.sums.bytes)))
        return self._read(lambda descriptor: os.pread(descriptor, length, start))

    def fill(self, content: memoryview, first: int) -> None:
        """Read whole blocks from block `first` into `content`, and verify each. Raises `DataError`,
        naming the damaged block, and as `StorageWaits.retry` if they cannot be read now."""
        file, start = self._file, first * self._file.block_bytes
        if file.memory is not None:
            if self._is_remembered(file.memory, content, first):
                self.bytes_from_memory += len(content)
                return
            file.memory = None
        self._read(lambda descriptor: self._read_fully(descriptor, content, start))
        if (number := self._damaged(content, first)) is not None:
            raise DataError(
                f"{file.name}: block {number} (from byte {number * file.block_bytes}) "
                "does not match its checksum"
            )

    def _is_remembered(self, memory: MemoryCopy, content: memoryview, first: int) -> bool:
        """Read these blocks from memory into `content`; whether they match their checksums."""
        start = memory.start + first * self._file.block_bytes
        count = os.preadv(memory.descriptor, [content], start)
        return count == len(content) and self._damaged(content, first) is None

    def _damaged(self, content: memoryview, first: int) -> int | None:
        """The number of the first damaged block, counted from `first`; None if all match."""
        size, sums = self._file.block_bytes, self._file.sums.blocks
        for number, begin in enumerate(range(0, len(content), size), first):
            if xxhash.xxh3_64_hexdigest(content[begin : begin + size]) != sums[number]:
                return number
        return None

    def _read(self, work: Callable[[int], T]) -> T:
        """Do `work` on the open file; after an error, retry on a reopened one."""

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
            _check_open_length(self._descriptor, self._file.path, self._file.sums.bytes)
        return self._descriptor

    def _read_fully(self, descriptor: int, content: memoryview, start: int) -> None:
        done = 0
        while done < len(content):
            count = os.preadv(descriptor, [content[done:]], start + done)
            if count == 0:
                self.close()
                self._open()  # raises if the length has changed
                raise OSError(errno.EIO, f"nothing was read at byte {start + done}")
            done += count

    def read(self, start: int, end: int) -> memoryview:
        """The verified bytes from `start` up to `end`; valid until the next read."""
        size = self._file.block_bytes
        first, last = start // size, -(-end // size)
        if not self._first <= first < last <= self._last:
            self._hold(first, last)
        at = self._first * size
        return self._buffer[start - at : end - at]

    def _hold(self, first: int, last: int) -> None:
        """Fill the buffer with the blocks from `first` up to `last`, keeping those already
        there."""
        size = self._file.block_bytes
        length = min(last * size, self._file.sums.bytes) - first * size
        kept = self._buffer[:0]
        if self._first <= first < self._last:
            held = min(self._last * size, self._file.sums.bytes) - self._first * size
            kept = self._buffer[(first - self._first) * size : held]
        buffer = self._buffer
        if len(buffer) < length:
            buffer = memoryview(mmap.mmap(-1, length))
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
        content = read_whole(sidecar, files[entry.sums])
    except DataError as error:
        raise DataError(f"its block checksums, {error}") from error
    block_bytes, sums = decode_sidecar(content, sidecar)
    if path.name not in sums or sums[path.name].bytes != entry.bytes:
        raise DataError(f"its block checksums, {sidecar.name}, do not list {path.name}")
    return block_bytes, sums[path.name]


@dataclass(frozen=True)
class Verification:
    """The result of a full verification at `time` (seconds since the epoch): the number of damaged
    files."""

    time: float
    damaged: int


def record(folder: Path, manifest: Manifest, damages: Sequence[Damage], now: float) -> None:
    """Store the result of a verification. Raises `OSError`."""
    entry = {"time": round(now, 3), "manifest": digest(manifest), "damaged": len(damages)}
    append_line(folder / VERIFIED, json.dumps(entry))


def read_findings(folder: Path) -> dict[str, Verification]:
    """The last result for each checkpoint, by its manifest's digest."""
    found = {}
    for line in read_lines(folder / VERIFIED):
        try:
            found[str(line["manifest"])] = Verification(float(line["time"]), int(line["damaged"]))
        except (KeyError, TypeError, ValueError):
            continue  # not a line of ours
    return found
