"""A disk that may lose power: what is settled on it, and what is only on its way.

The model is what POSIX promises and nothing beyond. What fsync has returned for is there. Of
everything else any part may be: bytes of a file in any pages, its length, and each change of a
directory (an entry made, removed or renamed, atomically) for itself, in whatever order. In
particular the fsync of a file says nothing of its name, and a rename may be there when the content
of the file is not.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import TypeAlias, TypeVar

import xxhash
from tracer import Call

PAGE = 4096

Tree: TypeAlias = "Mapping[str, bytes | str | Tree]"
"""A folder: names to contents, texts of links, or folders."""

T = TypeVar("T")


@dataclass
class File:
    """Bytes that are settled, and writes (offset, content) and lengths that are not."""

    settled: bytes = b""
    pending: list[tuple[int, bytes]] = field(default_factory=list)

    def write(self, at: int, content: bytes) -> None:
        self.pending.append((at, content))

    def sync(self) -> None:
        self.settled, self.pending = self.now(), []

    def now(self) -> bytes:
        if not self.pending:
            return self.settled
        return _apply(self.settled, self.pending)

    def after_power_loss(self, random: Random) -> bytes:
        if not self.pending:
            return self.settled
        arrived = [_in_part(at, content, random) for at, content in _some(self.pending, random)]
        return _apply(self.settled, arrived)


@dataclass
class Link:
    """A symbolic link; it is there whole or not at all."""

    text: str


@dataclass
class Folder:
    """Entries that are settled, and changes that are not: names to nodes, None if removed."""

    settled: dict[str, Node] = field(default_factory=dict)
    pending: list[dict[str, Node | None]] = field(default_factory=list)

    def change(self, entries: dict[str, Node | None]) -> None:
        self.pending.append(entries)

    def sync(self) -> None:
        self.settled, self.pending = self.now(), []

    def now(self) -> dict[str, Node]:
        return _entries(self.settled, self.pending)

    def after_power_loss(self, random: Random) -> dict[str, Node]:
        return _entries(self.settled, _some(self.pending, random))


Node: TypeAlias = File | Link | Folder


class Disk:
    """Replays the calls that touch `root`, a folder that was empty before."""

    def __init__(self, root: Path) -> None:
        self._root = str(root)
        self._top = Folder()

    def apply(self, call: Call) -> None:
        """Take note of a call that has been made."""
        if call.result < 0 or not f"{call.path}/".startswith(f"{self._root}/"):
            return
        if call.name in ("fsync", "fdatasync"):
            node = self._find(call.path)
            assert isinstance(node, File | Folder), call
            node.sync()
        elif call.name in ("write", "pwrite64"):
            self._file(call.path).write(self._offset(call), call.content[: call.result])
        elif call.name == "fallocate":
            self._file(call.path).write(call.arguments[2], bytes(call.arguments[3]))
        elif call.name == "rename":
            self._rename(call.path, call.target)
        else:
            self._change_entry(call)

    def now(self) -> Tree:
        """What a process sees."""
        return _see(self._top)

    def after_power_loss(self, random: Random) -> Tree:
        """What may be there when the power comes back."""
        return _lose(self._top, random)

    def _change_entry(self, call: Call) -> None:
        made: Node | None
        if call.name in ("mkdir", "mkdirat"):
            made = Folder()
        elif call.name in ("symlink", "symlinkat"):
            made = Link(call.target)
        elif call.creates and self._find(call.path) is None:
            made = File()
        elif call.name in ("unlink", "unlinkat", "rmdir"):
            made = None
        else:
            assert not call.opens_for_writing or call.creates, f"not modelled: {call}"
            return
        if call.path != self._root:
            self._parent(call.path).change({_name(call.path): made})

    def _rename(self, source: str, target: str) -> None:
        folder = self._parent(source)
        assert folder is self._parent(target), "a rename between folders is not modelled"
        node = self._find(source)
        assert node is not None, f"{source} is renamed, but no call made it"
        folder.change({_name(source): None, _name(target): node})

    def _offset(self, call: Call) -> int:
        """Where a write begins; write(2) is only ever used from the start of a file to its end."""
        return call.arguments[3] if call.name == "pwrite64" else len(self._file(call.path).now())

    def _file(self, path: str) -> File:
        node = self._find(path)
        assert isinstance(node, File), f"{path} is written to, but no call made it"
        return node

    def _parent(self, path: str) -> Folder:
        node = self._find(path.rpartition("/")[0])
        assert isinstance(node, Folder), f"{path} changes, but no call made its folder"
        return node

    def _find(self, path: str) -> Node | None:
        node: Node | None = self._top
        for name in path.removeprefix(self._root).split("/")[1:]:
            node = node.now().get(name) if isinstance(node, Folder) else None
        return node


def put(tree: Tree, folder: Path) -> None:
    """Make a real folder of it."""
    folder.mkdir()
    for name, node in tree.items():
        if isinstance(node, bytes):
            (folder / name).write_bytes(node)
        elif isinstance(node, str):
            (folder / name).symlink_to(node)
        else:
            put(node, folder / name)


def digest(tree: Tree) -> bytes:
    """What tells trees apart."""
    whole = xxhash.xxh3_128()
    for name, node in sorted(tree.items()):
        content = node if isinstance(node, bytes | str) else digest(node)
        whole.update(f"{name}/{type(node)}/{len(content)}/".encode())
        whole.update(content.encode() if isinstance(content, str) else content)
    return whole.digest()


def look(folder: Path) -> Tree:
    """What is in a real folder."""

    def see(path: Path) -> bytes | str | Tree:
        if path.is_symlink():
            return str(path.readlink())
        return look(path) if path.is_dir() else path.read_bytes()

    return {path.name: see(path) for path in folder.iterdir()}


def _see(folder: Folder) -> Tree:
    def one(node: Node) -> bytes | str | Tree:
        if isinstance(node, Link):
            return node.text
        return _see(node) if isinstance(node, Folder) else node.now()

    return {name: one(node) for name, node in folder.now().items()}


def _lose(folder: Folder, random: Random) -> Tree:
    def one(node: Node) -> bytes | str | Tree:
        if isinstance(node, Link):
            return node.text
        return _lose(node, random) if isinstance(node, Folder) else node.after_power_loss(random)

    return {name: one(node) for name, node in folder.after_power_loss(random).items()}


def _name(path: str) -> str:
    return path.rpartition("/")[2]


def _some(pending: list[T], random: Random) -> list[T]:
    """Of what was on its way: nothing, all, the first few, or any of it."""
    how = random.randrange(4)
    if how == 0:
        return []
    if how == 1:
        return pending
    if how == 2:
        return pending[: random.randint(0, len(pending))]
    return [one for one in pending if random.random() < 0.5]


def _in_part(at: int, content: bytes, random: Random) -> tuple[int, bytes]:
    """All of a write, a part of its length, or only some of its pages and zeros for the others."""
    how = random.randrange(3)
    if how == 0:
        return at, content
    if how == 1:
        return at, content[: random.randint(0, len(content))]
    pages = [content[start : start + PAGE] for start in range(0, len(content), PAGE)]
    return at, b"".join(page if random.random() < 0.5 else bytes(len(page)) for page in pages)


def _apply(settled: bytes, writes: list[tuple[int, bytes]]) -> bytes:
    content = bytearray(settled)
    for at, piece in writes:
        content.extend(bytes(max(0, at + len(piece) - len(content))))
        content[at : at + len(piece)] = piece
    return bytes(content)


def _entries(settled: dict[str, Node], changes: list[dict[str, Node | None]]) -> dict[str, Node]:
    entries: dict[str, Node | None] = {**settled}
    for change in changes:
        entries.update(change)
    return {name: node for name, node in entries.items() if node is not None}
