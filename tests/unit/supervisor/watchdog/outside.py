"""What befalls a job from outside: its storage freezes or fails, its group of processes may make no
more of them, or the kernel ends the one with the most memory."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from faulty_storage import mount as faulty
from faulty_storage.rules import HANG, Match, Rule
from harness import wait_until

ALL_OF_IT = Match(("*", "/"))

LACKS_UNTIL = 7.0
"""Seconds before the job's end at which there is room for processes again."""

MEMORY = 400 << 20
"""Bytes of a job; the supervisor needs a fifth of that."""


@dataclass(frozen=True)
class Place:
    """Where a job runs: its `storage`, and the command that it is started `within`.

    `act` lets it happen, and `release` ends it: `until` seconds before the job's end if that is
    given, else once all is over."""

    storage: Path
    within: tuple[str, ...] = ()
    act: Callable[[], object] = field(default=lambda: None)
    release: Callable[[], object] = field(default=lambda: None)
    until: float | None = None


def nothing_outside(folder: Path) -> AbstractContextManager[Place]:
    return _plain(folder)


@contextmanager
def _plain(folder: Path) -> Iterator[Place]:
    storage = folder / "storage"
    storage.mkdir()
    yield Place(storage)


@contextmanager
def _fuse(folder: Path, fault: str) -> Iterator[Place]:
    with faulty.mounted(folder / "fuse") as mount:
        rule = Rule("all", fault, ALL_OF_IT)
        yield Place(mount.path, act=lambda: mount.add(rule), release=mount.clear)


@contextmanager
def _frozen(folder: Path) -> Iterator[Place]:
    """A real file system that fsfreeze(8) holds: what writes, waits."""
    image, storage = folder / "image", folder / "storage"
    storage.mkdir()
    with image.open("wb") as file:
        file.truncate(16 << 20)
    _run("mkfs.ext4", "-q", "-F", str(image))
    _run("mount", "-o", "loop", str(image), str(storage))
    try:
        freeze = lambda: _run("fsfreeze", "-f", str(storage))  # noqa: E731
        yield Place(storage, act=freeze, release=lambda: _try("fsfreeze", "-u", str(storage)))
    finally:
        _try("umount", "-l", str(storage))


@contextmanager
def _few_processes(folder: Path) -> Iterator[Place]:
    with _group("pids", folder) as group, _plain(folder) as place:
        limit = group / "pids.max"
        yield Place(
            place.storage,
            _enter(group),
            lambda: limit.write_text("1"),
            lambda: limit.write_text("max"),
            LACKS_UNTIL,
        )


@contextmanager
def _little_memory(folder: Path) -> Iterator[Place]:
    with _group("memory", folder) as group, _plain(folder) as place:
        files = (group / name for name in ("memory.max", "memory.limit_in_bytes"))
        next(file for file in files if file.exists()).write_text(str(MEMORY))
        yield Place(place.storage, _enter(group))


def _enter(group: Path) -> tuple[str, ...]:
    return ("sh", "-c", f'echo $$ > {group}/cgroup.procs; exec "$@"', "sh")


@contextmanager
def _group(controller: str, folder: Path) -> Iterator[Path]:
    above = group_of(controller)
    assert above is not None
    group = above / f"kempner-{os.getpid()}-{folder.parent.name}-{folder.name}"
    group.mkdir()
    try:
        yield group
    finally:
        # Those that were killed leave it one by one.
        wait_until(lambda: not (group / "cgroup.procs").read_text(), "the group to be empty", 20)
        group.rmdir()


def group_of(controller: str) -> Path | None:
    """The control group of this process for a controller, if others can be made below it."""
    root = Path("/sys/fs/cgroup")
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, names, path = line.split(":", 2)
        if controller in names.split(","):
            group = root / controller / path.lstrip("/")
        elif not names:
            group = root / path.lstrip("/")
            allowed = group / "cgroup.subtree_control"
            if not allowed.exists() or controller not in allowed.read_text().split():
                continue
        else:
            continue
        if os.access(group / "cgroup.procs", os.W_OK):
            return group
    return None


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def _try(*command: str) -> None:
    subprocess.run(command, check=False, capture_output=True)


def _available() -> Iterator[tuple[str, Callable[[Path], AbstractContextManager[Place]]]]:
    if not faulty.missing():
        yield "fuse hangs", lambda folder: _fuse(folder, HANG)
        yield "fuse fails", lambda folder: _fuse(folder, "EIO")
    if os.geteuid() == 0 and Path("/dev/loop-control").exists():
        yield "fsfreeze", _frozen
    if group_of("pids") is not None:
        yield "pids.max", _few_processes
    if group_of("memory") is not None:
        yield "oom", _little_memory


OUTSIDE = dict(_available())
"""What can happen on this machine."""
