"""Durable and atomic writes of small files, renames and links."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

LATE = 60.0
"""Seconds for which a host may not see what another has made: NFS's default acdirmax, nfs(5)."""


def fsync_directory(path: Path) -> None:
    """Make the directory's entries (creations, renames, removals) survive a power loss."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_durable(path: Path, content: bytes | memoryview) -> None:
    """Write a new file and fsync it. The caller fsyncs the directory."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path, arrived: Callable[[], bool]) -> None:
    """Rename, also where the answer is lost on its way; raises `OSError`.

    A client of a network file system that got no answer asks again, and is told that `source` is
    not there because the first request was carried out. `arrived` tells whether `target` is what
    `source` was.
    """
    try:
        source.rename(target)
    except FileNotFoundError:
        if not arrived():
            raise


def holds(path: Path, content: bytes) -> bool:
    """Whether `path` is a file with this content."""
    return path.is_file() and path.read_bytes() == content


def await_entry(
    path: Path, seconds: float = LATE, pause: Callable[[float], None] = time.sleep
) -> bool:
    """Whether `path` is there, or comes to be seen within `seconds`: another host has made it."""
    end = time.monotonic() + seconds
    while not os.access(path, os.F_OK):  # which asks for no more than the name
        if time.monotonic() > end:
            return False
        pause(0.1)
    return True


def comes_to_hold(path: Path, content: bytes, seconds: float) -> bool:
    """Whether `path` is, or within `seconds` comes to be, a file of another host with this content:
    whether its folder is the same one there."""
    return await_entry(path, seconds) and holds(path, content)


def join_directory(path: Path) -> None:
    """Make a directory that others make at the same moment, and wait until it is seen.

    The folder that it is in must be there: nothing is made in the place of storage that is away.
    Raises `OSError`.
    """
    try:
        path.mkdir()
    except FileExistsError:
        if not await_entry(path):
            raise


def replace_durable(path: Path, content: bytes, *, unique: str) -> None:
    """Replace `path` so that a reader sees the old content or the new one, also after a crash.

    `unique` keeps the temporary names of concurrent writers apart. Raises `OSError`, and leaves no
    temporary file then.
    """
    temporary = path.with_name(f".{path.name}.{unique}")
    temporary.unlink(missing_ok=True)
    try:
        write_durable(temporary, content)
        rename(temporary, path, arrived=lambda: holds(path, content))
    except BaseException:
        with suppress(OSError):  # what cannot be written may be beyond removal, too
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yields a name to write to, beside `target`; what is there in the end becomes `target`.

    It does so by one rename, made durable; the writer fsyncs what it wrote. Whatever goes wrong
    before leaves nothing behind. Raises `FileExistsError` if `target` is there.
    """
    _refuse_to_replace(target)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}")
    try:
        yield temporary
        _refuse_to_replace(target)
        temporary.rename(target)
        fsync_directory(target.parent)
    except BaseException:
        if temporary.is_dir():
            shutil.rmtree(temporary)
        else:
            temporary.unlink(missing_ok=True)
        raise


def _refuse_to_replace(target: Path) -> None:
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))


def append_line(path: Path, line: str) -> None:
    """Append one line with a single write(2), and start it on a line of its own.

    A writer that was killed may have left half a line behind: without the newline that this puts
    before the next one, the new line would be lost together with the torn one.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = (("\n" if torn else "") + line + "\n").encode()
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, "only a part of the line was written", str(path))
    finally:
        os.close(descriptor)
