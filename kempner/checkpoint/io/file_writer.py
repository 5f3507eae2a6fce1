"""Writes a buffer to a file: space reserved first, checksums on the way, fsync at the end.

All work is done in large calls that release the interpreter's lock, so that training continues.
The page cache is bypassed (O_DIRECT) if buffer and file system allow it: another copy, and the
kernel's reclaiming of pages, would take a core from training. Else pages are written back early and
dropped: a cache full of dirty pages slows down the last fsync, and everything that needs memory.

Files of frozen tensors are written twice, then hard-linked from one checkpoint to the next. Each
checkpoint is complete by itself, so readers and deletions need not know of the links. Since a
flipped bit in a file damages every checkpoint that links to it, there are two files, used in turn,
so that neighbouring checkpoints never share one.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import xxhash

from kempner.checkpoint.format.manifest import BLOCK_BYTES, FileSums, decode_sidecar, sum_file
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.run.process.exit_codes import DataError

SLAB_BYTES = 16 * BLOCK_BYTES  # bytes per write(2)
WRITE_BEHIND = 4
"""Slabs that may be in write-back before the writer waits for the oldest."""

DIRECT_ALIGNMENT = 4096
"""Alignment of address, offset and length of direct writes."""

_NOT_SUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}
_START_WRITING, _WAIT_WRITTEN = 2, 7  # SYNC_FILE_RANGE_WRITE; WAIT_BEFORE | WRITE | WAIT_AFTER
_IOPRIO_WHO_PROCESS, _IOPRIO_LOWEST = 1, (2 << 13) | 7  # best effort, level 7

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)
_libc.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
_SYS_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}.get(os.uname().machine)


def yield_to_training() -> None:
    """Give the calling thread, and no other, the lowest scheduling and I/O priority."""
    thread = threading.get_native_id()
    os.setpriority(os.PRIO_PROCESS, thread, 19)
    if _SYS_IOPRIO_SET is not None:
        # Best effort: the kernel may have no I/O priorities.
        _libc.syscall(_SYS_IOPRIO_SET, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_LOWEST)


def write_stream(path: Path, content: memoryview) -> FileSums:
    """Create `path` with `content` (bytes), fsync it, and return the checksums of its blocks.
    Raises `OSError`, naming `path`: ENOSPC or EDQUOT before anything is written where the file
    system can reserve space."""
    whole = _begins_on_a_page(content)
    return _write(path, len(content), lambda start, end: content[start:end], whole)


def write_from(path: Path, length: int, read: Callable[[memoryview, int], None]) -> FileSums:
    """As `write_stream`, with `length` bytes that `read` copies slab by slab from an offset."""
    buffer = memoryview(mmap.mmap(-1, max(1, min(length, SLAB_BYTES))))

    def take(start: int, end: int) -> memoryview:
        slab = buffer[: end - start]
        read(slab, start)
        return slab

    return _write(path, length, take, length >= DIRECT_ALIGNMENT)


def _write(
    path: Path, length: int, take: Callable[[int, int], memoryview], direct: bool
) -> FileSums:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        return _write_slabs(descriptor, length, take, direct)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _write_slabs(
    descriptor: int, length: int, take: Callable[[int, int], memoryview], direct: bool
) -> FileSums:
    reserve(descriptor, length)
    blocks: list[str] = []
    write = _DirectWriter(descriptor) if direct else _CachedWriter(descriptor)
    with ThreadPoolExecutor(1, "checksums", initializer=yield_to_training) as beside:
        for start in range(0, length, SLAB_BYTES):
            slab = take(start, min(start + SLAB_BYTES, length))
            sums = beside.submit(_sum_blocks, slab)
            write(slab, start)
            blocks += sums.result()
    os.fsync(descriptor)
    return FileSums(bytes=length, blocks=tuple(blocks))


def _sum_blocks(slab: memoryview) -> list[str]:
    starts = range(0, len(slab), BLOCK_BYTES)
    return [xxhash.xxh3_64_hexdigest(slab[at : at + BLOCK_BYTES]) for at in starts]


def _begins_on_a_page(content: memoryview) -> bool:
    if len(content) < DIRECT_ALIGNMENT or content.readonly:
        return False
    return ctypes.addressof(ctypes.c_byte.from_buffer(content)) % DIRECT_ALIGNMENT == 0


class _CachedWriter:
    """Writes slabs in order through the page cache, and keeps few dirty pages."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def __call__(self, slab: memoryview, start: int) -> None:
        write_all(self._descriptor, slab, start)
        _sync_range(self._descriptor, start, len(slab), _START_WRITING)
        if start >= WRITE_BEHIND * SLAB_BYTES:
            behind = start - WRITE_BEHIND * SLAB_BYTES
            _sync_range(self._descriptor, behind, SLAB_BYTES, _WAIT_WRITTEN)
            os.posix_fadvise(self._descriptor, behind, SLAB_BYTES, os.POSIX_FADV_DONTNEED)


class _DirectWriter(_CachedWriter):
    """Writes slabs in order with direct I/O, as long as the file system allows it."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor)
        self._bypass = self._set(os.O_DIRECT)

    def __call__(self, slab: memoryview, start: int) -> None:
        whole = len(slab) - len(slab) % DIRECT_ALIGNMENT if self._bypass else 0
        try:
            write_all(self._descriptor, slab[:whole], start)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            whole = 0  # the file system needs another alignment
        if whole < len(slab):  # the unaligned end of the file, or all from here on
            self._bypass = self._set(0)
            super().__call__(slab[whole:], start + whole)

    def _set(self, flag: int) -> bool:
        try:
            fcntl.fcntl(self._descriptor, fcntl.F_SETFL, flag)
        except OSError as error:
            if error.errno not in _NOT_SUPPORTED:
                raise
            return False
        return bool(flag)


def reserve(descriptor: int, length: int) -> None:
    """Reserve `length` bytes for a file, if the file system can. Raises `OSError`."""
    if length and _libc.fallocate(descriptor, 0, 0, length) != 0:
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))


def write_all(descriptor: int, slab: memoryview, at: int) -> None:
    while slab:
        written = os.pwrite(descriptor, slab, at)
        slab, at = slab[written:], at + written


def _sync_range(descriptor: int, start: int, length: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, start, length, flags) != 0:
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))


class BaseFiles:
    """Writes or links one rank's files of frozen tensors in the checkpoints of `folder`."""

    def __init__(self, folder: CheckpointFolder) -> None:
        self._folder = folder
        self._sound: set[tuple[int, int]] = set()
        """Device and inode of files that this process has written or verified."""

    def write(self, path: Path, name: str, sidecar: str, content: memoryview) -> FileSums:
        """Create the file `name` in `path` with `content`, as a link if the checkpoint before the
        newest has the same content; the block checksums. Raises `OSError` as `write_stream`."""
        target = path / name
        sums = FileSums(bytes=len(content), blocks=tuple(_sum_blocks(content)))
        older = self._folder.committed()[-2:-1]
        if not older or not self._link(self._folder.step(older[0]), name, sidecar, sums, target):
            write_stream(target, content)
            self._sound.add(_identity(target))
        return sums

    def _link(self, older: Path, name: str, sidecar: str, sums: FileSums, target: Path) -> bool:
        """Link to the file in `older` if it has these checksums; whether that was done."""
        with suppress(OSError, DataError):  # no such file, or no links on this file system
            source = older / name
            if decode_sidecar((older / sidecar).read_bytes(), older / sidecar)[1].get(name) != sums:
                return False
            if _identity(source) not in self._sound and sum_file(source) != sums:
                return False
            os.link(source, target)
            self._sound.add(_identity(target))
            return True
        return False


def _identity(file: Path) -> tuple[int, int]:
    found = file.stat()
    return found.st_dev, found.st_ino
