"""Durable and atomic writes of small files, probes of file systems, names that are not UTF-8."""

from __future__ import annotations

import errno
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from pydantic import TypeAdapter

LATE = 60.0
"""Seconds for which a host may not see what another has made: NFS's default acdirmax, nfs(5)."""


_NO_FSYNC_OF_FOLDERS = {errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS}


def fsync_directory(path: Path) -> None:
    """Make the directory's entries (creations, renames, removals) survive a power loss, if the file
    system supports that."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_FSYNC_OF_FOLDERS:
            raise
    finally:
        os.close(descriptor)


def write_durable(path: Path, content: bytes | memoryview) -> None:
    """Write a new file and fsync it. The caller fsyncs the directory."""
    with open(path, "xb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def rename(source: Path, target: Path, arrived: Callable[[], bool]) -> None:
    """Rename, also if the server's answer is lost: a network file system then asks again, and
    reports that `source` is gone or that the answer was lost. `arrived` returns whether `target`
    has the content of `source`. Raises `OSError`."""
    try:
        source.rename(target)
    except OSError:
        there = False
        with suppress(OSError):  # the first error says more
            there = arrived()
        if not there:
            raise


def holds(path: Path, content: bytes) -> bool:
    return path.is_file() and path.read_bytes() == content


def await_entry(
    path: Path, seconds: float = LATE, pause: Callable[[float], None] = time.sleep
) -> bool:
    """Whether `path`, which another host creates, is visible here within `seconds`."""
    end = time.monotonic() + seconds
    while not is_listed(path):
        if time.monotonic() > end:
            return False
        pause(0.1)
    return True


def is_listed(path: Path) -> bool:
    """Whether a name exists, even if this host has cached that it does not: network file systems do
    so for seconds, but ask the server when a folder is opened again. Raises `OSError`."""
    if os.access(path, os.F_OK):  # checks only that the name exists
        return True
    try:
        return any(entry.name == path.name for entry in path.parent.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return False


def comes_to_hold(path: Path, content: bytes, seconds: float) -> bool:
    """Whether `path` is within `seconds` a file with this content, which another host has written:
    that shows that both see the same folder."""
    return await_entry(path, seconds) and holds(path, content)


def join_directory(path: Path) -> None:
    """Make a directory that other hosts may make at the same moment, and wait until it is visible.
    Its parent must exist: an unmounted file system must not be replaced. Raises `OSError`."""
    try:
        path.mkdir()
    except FileExistsError:
        if not await_entry(path):
            raise


def replace_durable(path: Path, content: bytes, *, unique: str) -> None:
    """Replace `path` so that a reader sees the old content or the new one, also after a crash.
    `unique` tells the temporary files of concurrent writers apart; none stays. Raises `OSError`."""
    temporary = path.with_name(f".{path.name}.{unique}")
    temporary.unlink(missing_ok=True)
    try:
        write_durable(temporary, content)
        rename(temporary, path, arrived=lambda: holds(path, content))
    except BaseException:
        with suppress(OSError):  # if writing fails, removal may fail, too
            temporary.unlink(missing_ok=True)
        raise
    fsync_directory(path.parent)


@contextmanager
def publish(target: Path) -> Iterator[Path]:
    """Yield a temporary path beside `target`, and rename it to `target` durably at the end of the
    block, or remove it if the block raises. The writer fsyncs. Raises `FileExistsError`."""
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
    """Append one line with a single write(2), after a newline if a killed writer has left an
    incomplete line."""
    descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        size = os.fstat(descriptor).st_size
        torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        content = (("\n" if torn else "") + line + "\n").encode()
        if os.write(descriptor, content) != len(content):
            raise OSError(errno.ENOSPC, "only a part of the line was written", str(path))
    finally:
        os.close(descriptor)


_BYTES, _CHARACTERS = range(0xDC80, 0xDD00), range(0xF780, 0xF800)
_TO_TEXT = dict(zip(_BYTES, _CHARACTERS, strict=True))
_TO_NAMES = dict(zip(_CHARACTERS, _BYTES, strict=True))

T = TypeVar("T")


def adapter_of(kind: type[T]) -> TypeAdapter[T]:
    """Pydantic's adapter of a type, made at its first use: a process does not use all types of the
    modules that it imports."""
    from pydantic import TypeAdapter

    if kind not in _adapters:
        _adapters[kind] = TypeAdapter(kind)
    return _adapters[kind]


_adapters: dict[Any, TypeAdapter[Any]] = {}


def as_text(value: T) -> T:
    """A value made of dataclasses, paths, mappings and sequences, with all text valid in UTF-8;
    `as_names` is the inverse."""
    text: T = _translated(value, _TO_TEXT)
    return text


def as_names(value: T) -> T:
    names: T = _translated(value, _TO_NAMES)
    return names


def _translated(value: Any, table: dict[int, int]) -> Any:
    if isinstance(value, str):
        return value if value.isascii() else value.translate(table)
    if isinstance(value, Path):
        return Path(_translated(str(value), table))
    if isinstance(value, dict):
        return {_translated(k, table): _translated(v, table) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_translated(one, table) for one in value)
    if is_dataclass(value) and not isinstance(value, type):
        own = [each.name for each in fields(value) if each.init]
        return replace(value, **{name: _translated(getattr(value, name), table) for name in own})
    return value


_NAME = ".kempner-probe-"
"""Prefix of the folders that a probe makes."""

_CANNOT = {
    *(errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EXDEV),
    *(errno.EISDIR, errno.EEXIST, errno.ENOTEMPTY),
}
"""Error numbers of what a file system does not support. Others are temporary, or about rights."""


@dataclass(frozen=True)
class FileSystem:
    """What a file system supports; None where that could not be tried."""

    symlinks: bool | None = None
    exclusive: bool | None = None
    """Whether O_EXCL creates a file only once."""
    replaces: bool | None = None
    """Whether a rename replaces an existing file."""
    moves_folders: bool | None = None
    modes: bool | None = None
    """Whether file modes keep other users from reading a file."""
    syncs_folders: bool | None = None

    def refusal(self, folder: Path) -> str:
        """Why `folder` cannot hold a run, in a sentence; empty if it can."""
        needed = {
            "create a file only where there is none (O_EXCL)": self.exclusive,
            "replace a file by a rename": self.replaces,
            "rename folders": self.moves_folders,
        }
        lacking = [what for what, can in needed.items() if can is False]
        if not lacking:
            return ""
        return (
            f"the file system of {folder} cannot {' and cannot '.join(lacking)}, which checkpoints "
            "and a run's record need: set run.dir and checkpoint.dir to another one"
        )

    def remarks(self) -> Iterator[str]:
        if self.symlinks is False:
            yield "no symbolic links: `latest` will be a file"
        if self.modes is False:
            yield "no file modes: every user who sees the folder can read the secrets of a run"
        if self.syncs_folders is False:
            yield "folders cannot be fsynced: a power loss may undo the last commits"


def probe_file_system(folder: Path) -> FileSystem:
    """Try what a run needs in an existing folder, and clean up."""
    with suppress(OSError):  # left by a killed probe
        for old in folder.glob(f"{_NAME}*"):
            shutil.rmtree(old, ignore_errors=True)
    place = folder / f"{_NAME}{secrets.token_hex(4)}"
    try:
        place.mkdir()
    except OSError:
        return FileSystem()  # the first real write will say why
    try:
        return FileSystem(
            *(_try(partial(can, place)) for can in (_link, _exclude, _replace, _move)),
            *(_try(partial(can, place)) for can in (_keep_private, _sync)),
        )
    finally:
        shutil.rmtree(place, ignore_errors=True)


def _try(can: Callable[[], bool]) -> bool | None:
    try:
        return can()
    except OSError as error:
        return False if error.errno in _CANNOT else None


def _link(place: Path) -> bool:
    (place / "link").symlink_to("text")
    return str((place / "link").readlink()) == "text"


def _exclude(place: Path) -> bool:
    (place / "once").touch(exist_ok=False)
    try:
        (place / "once").touch(exist_ok=False)
    except FileExistsError:
        return True
    return False


def _replace(place: Path) -> bool:
    (place / "old").write_text("old")
    (place / "new").write_text("new")
    (place / "new").rename(place / "old")
    return (place / "old").read_text() == "new" and not (place / "new").exists()


def _move(place: Path) -> bool:
    (place / "here").mkdir()
    (place / "here" / "file").touch()
    (place / "here").rename(place / "there")
    return (place / "there" / "file").exists()


def _keep_private(place: Path) -> bool:
    (place / "secret").touch(0o600)
    (place / "secret").chmod(0o600)
    return (place / "secret").stat().st_mode & 0o777 == 0o600


def _sync(place: Path) -> bool:
    descriptor = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return True
