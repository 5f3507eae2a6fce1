"""Limits of a process and of its node: cgroup, resource limits, and what training needs of them.

The cgroup (v1 or v2) that limits a process's memory.

Files and keys: the kernel's admin-guide/cgroup-v2 ("Memory") and cgroup-v1/memory.

Which GPUs a process may see, by its environment.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from kempner.cluster.machine.job_place import is_step

_UNLIMITED = 1 << 60
"""Bytes; v1 writes no limit as a number that no machine has."""


@dataclass(frozen=True)
class MemoryGroup:
    """A folder of the memory controller: of a Slurm job as a whole, or else the process's own."""

    path: Path

    def oom_kills(self) -> int:
        """Processes in it that the kernel has killed for want of memory. Raises `OSError`.

        In v2 a group counts for those below it, in v1 each for itself.
        """
        if (self.path / "memory.events").exists():
            return _entries(self.path / "memory.events")["oom_kill"]
        files = [*self.path.rglob("memory.oom_control")] if _is_job(self.path) else []
        return sum(_kills_v1(file) for file in files or [self.path / "memory.oom_control"])

    def limit(self) -> int | None:
        """The most bytes that it may have; None for no limit. Raises `OSError`."""
        for name in ("memory.max", "memory.limit_in_bytes"):
            if (self.path / name).exists():
                text = (self.path / name).read_text().strip()
                return int(text) if text.isdecimal() and int(text) < _UNLIMITED else None
        return None

    def used(self) -> int:
        """Bytes that it has and that cannot be taken back, as a cache could. Raises `OSError`."""
        stat = _entries(self.path / "memory.stat")
        return stat["total_rss"] if "total_rss" in stat else stat["anon"]


def memory_group(
    groups: Path = Path("/proc/self/cgroup"), root: Path = Path("/sys/fs/cgroup")
) -> MemoryGroup | None:
    """The group of the process whose `/proc/PID/cgroup` is given; None if there is none to see."""
    for folder in _folders(groups.read_text(), root):
        # A container may see the whole path, and as its root what is mounted there.
        for path in (folder, root / "memory", root):
            if any((path / name).exists() for name in ("memory.events", "memory.oom_control")):
                return MemoryGroup(_of_job(path))
    return None


def _folders(groups: str, root: Path) -> Iterator[Path]:
    """Where the memory controller may be, by lines of the form `ID:CONTROLLERS:PATH`."""
    lines = [line.split(":", 2) for line in groups.splitlines()]
    for _, controllers, path in lines:
        if "memory" in controllers.split(","):
            yield root / "memory" / path.lstrip("/")
    for number, _, path in lines:
        if number == "0":
            yield root / path.lstrip("/")


def _of_job(path: Path) -> Path:
    """The group of the Slurm job that this one is a part of, or `path`.

    It is the parent of a step's. From Slurm 26.05 on it is named by the job's SLUID.
    """
    return next((each for each in (path, *path.parents) if _is_job(each)), path)


def _is_job(path: Path) -> bool:
    """Whether it is a job's: it has its name, or that of a step is below it."""
    name = path.name
    if name.startswith("job_") and name.removeprefix("job_").isdecimal():
        return True
    return any(is_step(each.name) for each in path.glob("step_*"))


def _kills_v1(file: Path) -> int:
    try:
        return _entries(file).get("oom_kill", 0)
    except FileNotFoundError:
        return 0  # the group of a step that has just ended


def _entries(file: Path) -> dict[str, int]:
    """A file of lines `KEY NUMBER`."""
    return {key: int(number) for key, number in map(str.split, file.read_text().splitlines())}


MEMORY = 0.02
"""Share of a node's memory that must be free before ranks are there."""

ROOM = 32 * 2**20
"""Bytes that must be free for temporary files, and in /dev/shm, where NCCL's ranks of a node meet.
"""

OPEN_FILES = (256, 4)
"""Open files that a rank needs, and more for each rank of the world: rank 0 hears from every one,
in each group and as the host of their store."""

SKEW = 60.0
"""Seconds that a node's clock may differ: munge, by which Slurm knows its nodes, bears with 300."""

SHARED_WITHIN = 5.0
"""Seconds after which a file that another host has written is seen, on any file system that is
shared; network file systems remember for a while that a file was not there."""


def open_files_needed(ranks: int) -> int:
    """How many files a rank of a world of `ranks` may have open at once."""
    least, each = OPEN_FILES
    return least + each * ranks


def clock_skew(time: float, during: tuple[float, float]) -> float:
    """Seconds by which a clock that showed `time` is ahead at least; 0 if it may be right.

    `during` is when it was asked and when it had answered, by our own clock.
    """
    start, end = during
    return max(0.0, time - end) + min(0.0, time - start)


def own_part(environ: Mapping[str, str], local_rank: int) -> str | None:
    """What CUDA_VISIBLE_DEVICES should be for a rank among parts of GPUs (MIG); None to leave it.

    A CUDA process sees only the first part of those that it is shown, so each rank must be shown
    its own: https://docs.nvidia.com/datacenter/tesla/mig-user-guide/ ("CUDA device enumeration").
    """
    shown = [device for device in environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if device]
    if len(shown) < 2 or not all(device.startswith("MIG-") for device in shown):
        return None
    return shown[local_rank] if local_rank < len(shown) else None
