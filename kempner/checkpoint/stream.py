"""Pours a buffer into a file: reserved first, checksummed on the way, durable at the end.

Everything happens in large calls that release the interpreter, so that training goes on beside it.
Pages are written back early and dropped behind: a page cache full of dirty checkpoint pages makes
the last fsync, and whatever else needs memory, slow.
"""

from __future__ import annotations

import ctypes
import errno
import os
import threading
from pathlib import Path

import xxhash

from kempner.checkpoint.manifest import BLOCK_BYTES, FileSums

SLAB_BYTES = 16 * BLOCK_BYTES
"""Bytes per write(2)."""

WRITE_BEHIND = 4
"""Slabs that may be on their way to the disk before the writer waits for the oldest."""

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
        # Best effort: a kernel without I/O priorities writes at the usual one.
        _libc.syscall(_SYS_IOPRIO_SET, _IOPRIO_WHO_PROCESS, thread, _IOPRIO_LOWEST)


def write_stream(path: Path, content: memoryview) -> FileSums:
    """Create `path` with `content` (bytes), fsync it, and return the checksums of its blocks.

    Raises `OSError`, naming `path`: ENOSPC or EDQUOT before anything is written where the file
    system can reserve space.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        return _pour(descriptor, content)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        os.close(descriptor)


def _pour(descriptor: int, content: memoryview) -> FileSums:
    reserve(descriptor, len(content))
    blocks: list[str] = []
    for number, start in enumerate(range(0, len(content), SLAB_BYTES)):
        slab = content[start : start + SLAB_BYTES]
        write_all(descriptor, slab, start)
        _sync_range(descriptor, start, len(slab), _START_WRITING)
        blocks += [
            xxhash.xxh3_64_hexdigest(slab[at : at + BLOCK_BYTES])
            for at in range(0, len(slab), BLOCK_BYTES)
        ]
        if number >= WRITE_BEHIND:
            _drop_behind(descriptor, start - WRITE_BEHIND * SLAB_BYTES)
    os.fsync(descriptor)
    return FileSums(bytes=len(content), blocks=tuple(blocks))


def reserve(descriptor: int, length: int) -> None:
    """Have `length` bytes set aside for a file, where the file system can. Raises `OSError`."""
    if length and _libc.fallocate(descriptor, 0, 0, length) != 0:
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))


def write_all(descriptor: int, slab: memoryview, at: int) -> None:
    """Write every byte of `slab` from byte `at` on. Raises `OSError`."""
    while slab:
        written = os.pwrite(descriptor, slab, at)
        slab, at = slab[written:], at + written


def _drop_behind(descriptor: int, start: int) -> None:
    _sync_range(descriptor, start, SLAB_BYTES, _WAIT_WRITTEN)
    os.posix_fadvise(descriptor, start, SLAB_BYTES, os.POSIX_FADV_DONTNEED)


def _sync_range(descriptor: int, start: int, length: int, flags: int) -> None:
    if _libc.sync_file_range(descriptor, start, length, flags) != 0:
        code = ctypes.get_errno()
        if code not in _NOT_SUPPORTED:
            raise OSError(code, os.strerror(code))
