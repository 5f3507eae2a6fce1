"""The faulty file system itself: whole where nothing is asked for, else faulty as asked."""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from faulty_storage.matrix import BROKEN, FULL, REFUSED
from faulty_storage.mount import Mount, mounted
from faulty_storage.rules import EMPTY, HANG, Life, Match, Rule
from harness import wait_until
from patience import scaled

from kempner.checkpoint.io.file_writer import write_stream

EVERYTHING = Match(("*",))


def only(*operations: str) -> Match:
    return Match(("*",), operations)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def with_open(flags: int, use: Callable[[int], object]) -> Callable[[Path], object]:
    def call(path: Path) -> object:
        descriptor = os.open(path / "file", flags)
        try:
            return use(descriptor)
        finally:
            os.close(descriptor)

    return call


CALLS: dict[str, Callable[[Path], object]] = {
    "open": lambda path: open(path / "file").close(),
    "read": with_open(os.O_RDONLY, lambda descriptor: os.pread(descriptor, 5, 0)),
    "readdir": lambda path: names(path),
    "stat": lambda path: (path / "file").stat(),
    "readlink": lambda path: (path / "link").readlink(),
    "create": lambda path: open(path / "new", "x").close(),
    "write": with_open(os.O_WRONLY, lambda descriptor: os.pwrite(descriptor, b"hello", 0)),
    "fsync": with_open(os.O_WRONLY, os.fsync),
    "flush": with_open(os.O_WRONLY, lambda descriptor: None),
    "mkdir": lambda path: (path / "folder").mkdir(),
    "rename": lambda path: (path / "file").rename(path / "renamed"),
    "unlink": lambda path: (path / "link").unlink(),
    "symlink": lambda path: (path / "other").symlink_to("file"),
    "truncate": lambda path: os.truncate(path / "file", 1),
    "statfs": os.statvfs,
}
"""A call of each kind, on a folder with a file and a link."""


@pytest.fixture
def folder(storage: Mount) -> Path:
    (storage.folder / "file").write_text("hello")
    (storage.folder / "link").symlink_to("file")
    return storage.path


@pytest.mark.parametrize("operation", CALLS)
def test_every_errno_arrives_and_passes(storage: Mount, folder: Path, operation: str) -> None:
    for name in (*BROKEN, *FULL, *REFUSED):
        storage.add(Rule(name, name, only(operation)))
        with pytest.raises(OSError) as caught:  # noqa: PT011 - which one is what is looked at
            CALLS[operation](folder)
        assert errno.errorcode[caught.value.errno or 0] == name
        (fault, *_) = storage.faults(name)
        assert (fault["op"], fault["fault"]) == (operation, name)
        storage.clear(name)
    CALLS[operation](folder)


def test_what_hangs_holds_up_nobody_else(storage: Mount, folder: Path) -> None:
    (storage.folder / "well").write_text("well")
    storage.add(Rule("hang", HANG, Match(("file",), ("open",))))
    said: list[str] = []
    readers = [
        threading.Thread(target=lambda: said.append((folder / "file").read_text()))
        for _ in range(30)
    ]
    for reader in readers:
        reader.start()
    wait_until(lambda: len(storage.faults("hang")) == len(readers), "all of them to hang")
    assert (folder / "well").read_text() == "well"
    assert said == []
    storage.clear("hang")
    for reader in readers:
        reader.join(scaled(20))
    assert said == ["hello"] * len(readers)


def test_a_fault_begins_with_its_first_operation_and_is_over_in_time(
    storage: Mount, folder: Path
) -> None:
    storage.add(Rule("short", "ESTALE", only("open"), seconds=0.5))
    assert storage.stage("short") == "armed"
    with pytest.raises(OSError, match="Stale"):
        (folder / "file").read_text()
    wait_until(lambda: storage.stage("short") == "over", "the end of the fault")
    assert (folder / "file").read_text() == "hello"


def test_what_is_empty_has_nothing_and_comes_back(storage: Mount, folder: Path) -> None:
    storage.add(Rule("empty", EMPTY, Match(("/", "file", "link"))))
    assert names(folder) == []
    with pytest.raises(FileNotFoundError):
        (folder / "file").read_text()
    storage.clear()
    assert names(folder) == ["file", "link"]


def test_what_is_cut_is_done_in_part_and_only_once(storage: Mount, folder: Path) -> None:
    storage.add(Rule("rename", "EIO", only("rename"), cut=True))
    with pytest.raises(OSError, match="Input/output"):
        (folder / "file").rename(folder / "renamed")
    assert (folder / "renamed").exists()
    with pytest.raises(OSError, match="Input/output"):
        (folder / "renamed").rename(folder / "file")
    (storage.folder / "renamed").rename(storage.folder / "file")
    storage.add(Rule("write", "EIO", only("write"), cut=True))
    for new in (b"HELL", b"BYE!"):  # the second is refused as a whole
        with pytest.raises(OSError, match="Input/output"):
            with_open(os.O_WRONLY, lambda file, new=new: os.pwrite(file, new, 0))(folder)
        assert (storage.folder / "file").read_text() == "HEllo"
    storage.add(Rule("read", "EIO", only("read"), cut=True))
    assert CALLS["read"](folder) == b"HE"
    with pytest.raises(OSError, match="Input/output"):
        CALLS["read"](folder)


def test_a_rule_waits_for_what_comes_before(storage: Mount, folder: Path) -> None:
    after = Match(("folder",), ("mkdir",))
    storage.add(Rule("then", "EIO", only("open"), after=after, count=2))
    (folder / "folder").mkdir()
    assert (folder / "file").read_text() == "hello"
    (folder / "folder").rmdir()
    (folder / "folder").mkdir()
    with pytest.raises(OSError, match="Input/output"):
        (folder / "file").read_text()


def test_a_fault_may_be_counted_from_any_operation_on() -> None:
    life = Life(Rule("now", "EIO", Match(("file",)), seconds=10.0, now=True))
    assert life.meet("open", "other", now=5.0) is None
    assert life.meet("open", "file", now=14.0) is not None
    assert life.meet("open", "file", now=15.0) is None


def test_chance_is_the_same_each_time() -> None:
    rule = Rule("p", "EIO", EVERYTHING, probability=0.3, seed=7)

    def met() -> list[bool]:
        life = Life(Rule.from_json(rule.to_json()))
        return [life.meet("read", "file", now=0.0) is not None for _ in range(200)]

    assert met() == met()
    assert met()[0]
    assert 40 < sum(met()) < 80


def test_a_checkpoint_file_goes_through_whole(storage: Mount) -> None:
    """Past the page cache, as all checkpoints are written."""
    content = mmap.mmap(-1, 5 * 2**20 + 100)
    content[:] = os.urandom(len(content))
    write_stream(storage.path / "file", memoryview(content))
    assert (storage.folder / "file").read_bytes() == content[:]
    assert (storage.path / "file").read_bytes() == content[:]


def test_appends_of_many_do_not_overwrite_each_other(storage: Mount) -> None:
    path = storage.path / "lines"

    def append(name: str) -> None:
        for _ in range(50):
            with open(path, "a") as file:
                file.write(name + "\n")

    writers = [threading.Thread(target=append, args=(name,)) for name in "abcd"]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(scaled(20))
    assert sorted(path.read_text().split()) == sorted("abcd" * 50)


def test_nothing_stays_mounted_whatever_hangs_or_is_open(fuse: None, tmp_path: Path) -> None:
    def look() -> None:
        with suppress(ConnectionAbortedError):
            (mount.path / "file").exists()

    with mounted(tmp_path / "storage") as mount:
        (mount.folder / "file").write_text("hello")
        held = os.open(mount.path / "file", os.O_RDONLY)
        mount.add(Rule("hang", HANG, only("stat")))
        stuck = threading.Thread(target=look)
        stuck.start()
        wait_until(lambda: mount.faults("hang"), "a thread that hangs")
    stuck.join(scaled(20))
    assert not stuck.is_alive()
    assert str(mount.path) not in Path("/proc/self/mounts").read_text()
    with pytest.raises(OSError, match="not connected"):
        os.pread(held, 1, 0)
    with suppress(OSError):
        os.close(held)
