"""A shared file system in memory, on which kempner's own commits, retention and attempts run.

`Place` has as much of `pathlib.Path` as they use. Every change is announced before it is made, so
that a process can die, a disk be full, or another process come first, at any of them. What the
model leaves out: caches and power loss (what is changed is there, at once and for all).
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from typing import Any, TypeAlias
from unittest.mock import patch

from kempner.checkpoint.format import names
from kempner.checkpoint.store import commit, retention
from kempner.run.process import durable_io

Entry: TypeAlias = "dict[str, Entry] | object"
"""A folder is a dict, a link is a `Link`, anything else is a file's content."""


class Link(str):
    """The text of a symbolic link."""

    __slots__ = ()


class Disk:
    """The root folder. `before(name, place, entry)` is called before each change; it may raise."""

    def __init__(self) -> None:
        self.root: dict[str, Any] = {}
        self.before: Callable[[str, Place, object], None] = lambda name, place, entry: None

    def place(self, *names: str) -> Place:
        """The path of these names below the root."""
        return Place(self, names)


class Place:
    """A path on a `Disk`."""

    __slots__ = ("_disk", "_names")

    def __init__(self, disk: Disk, names: tuple[str, ...]) -> None:
        self._disk, self._names = disk, names

    def __truediv__(self, name: str) -> Place:
        return Place(self._disk, (*self._names, name))

    def __lt__(self, other: Place) -> bool:
        return self._names < other._names

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Place) and self._names == other._names

    def __hash__(self) -> int:
        return hash(self._names)

    def __str__(self) -> str:
        return "/".join(self._names)

    @property
    def name(self) -> str:
        return self._names[-1] if self._names else ""

    @property
    def parent(self) -> Place:
        return Place(self._disk, self._names[:-1])

    def with_name(self, name: str) -> Place:
        return Place(self._disk, (*self._names[:-1], name))

    def exists(self) -> bool:
        return self._find() is not None

    def is_dir(self) -> bool:
        return isinstance(self._find(), dict)

    def is_file(self) -> bool:
        return not isinstance(self._find(), dict | Link | None)

    def iterdir(self) -> Iterator[Place]:
        return (self / name for name in list(self._folder()))

    def read_bytes(self) -> Any:
        if (content := self._find()) is None:
            raise FileNotFoundError(str(self))
        return content

    def readlink(self) -> str:
        if (link := self._find()) is None:
            raise FileNotFoundError(errno.ENOENT, "is not there", str(self))
        if not isinstance(link, Link):
            raise OSError(errno.EINVAL, "is no link", str(self))
        return link

    def mkdir(self, parents: bool = False, exist_ok: bool = False) -> None:
        if self.exists():
            if not exist_ok:
                raise FileExistsError(str(self))
            return
        self._disk.before("mkdir", self, None)
        if parents and not self.parent.exists():
            self.parent.mkdir(parents=True)
        self.parent._folder()[self.name] = {}

    def write(self, content: object) -> None:
        """Create a file, as `open(path, "x")` does."""
        self._disk.before("write", self, content)
        if self.exists():
            raise FileExistsError(str(self))
        self.parent._folder()[self.name] = content

    def symlink_to(self, text: str) -> None:
        self._disk.before("symlink", self, text)
        self.parent._folder()[self.name] = Link(text)

    def unlink(self, missing_ok: bool = False) -> None:
        if self.parent._folder().pop(self.name, None) is None and not missing_ok:
            raise FileNotFoundError(str(self))

    def rename(self, target: Place) -> None:
        self._disk.before("rename", target, self._find())
        if not self.exists():
            raise FileNotFoundError(str(self))
        if target.is_dir():
            raise OSError(f"{target} is in the way")
        target.parent._folder()[target.name] = self.parent._folder().pop(self.name)

    def remove(self) -> None:
        """Delete it with all that is in it."""
        self._disk.before("remove", self, None)
        self.parent._folder().pop(self.name)

    def _find(self) -> Any:
        entry: Any = self._disk.root
        for name in self._names:
            if not isinstance(entry, dict):
                return None
            entry = entry.get(name)
        return entry

    def _folder(self) -> dict[str, Any]:
        folder = self._find()
        if not isinstance(folder, dict):
            raise FileNotFoundError(str(self))
        return folder


def _write_durable(path: Place, content: object) -> None:
    path.write(content)


def _is_listed(path: Place) -> bool:
    return path.exists()


def _rename(source: Place, target: Place, arrived: object = None) -> None:
    source.rename(target)


def _fsync_directory(path: Place) -> None:
    path._disk.before("fsync", path, None)


@contextmanager
def in_memory() -> Iterator[None]:
    """While it is open, kempner's durable changes are made on a `Disk`.

    Only what speaks to the operating system is exchanged; what is done, and in which order, is not.
    A manifest is kept as an object: that its text survives a round trip is tested elsewhere.
    """
    exchanged = [
        (durable_io, {"write_durable": _write_durable, "fsync_directory": _fsync_directory}),
        (durable_io, {"is_listed": _is_listed, "rename": _rename}),
        (names, {"is_listed": _is_listed, "rename": _rename, "write_durable": _write_durable}),
        (commit, {"rename": _rename}),
        (commit, {"write_durable": _write_durable, "fsync_directory": _fsync_directory}),
        (commit, {"encode": lambda manifest: manifest}),
        (names, {"fsync_directory": _fsync_directory}),
        (retention, {"fsync_directory": _fsync_directory}),
        (retention, {"shutil": SimpleNamespace(rmtree=lambda place, **how: place.remove())}),
    ]
    with ExitStack() as stack:
        for module, functions in exchanged:
            for name, value in functions.items():
                stack.enter_context(patch.object(module, name, value))
        yield
