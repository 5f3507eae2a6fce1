"""Storage that stalls under the nodes of the lab, as when a file server does not answer."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lab import Cluster
from patience import scaled

from kempner.lab.services import PATH

SIZE = 512 << 20
"""Bytes of the disk."""


def missing() -> str:
    """Why there can be no such storage here; empty if there can."""
    tools = ("losetup", "mkfs.ext4", "fsfreeze")
    lacking = [tool for tool in tools if shutil.which(tool, path=PATH) is None]
    if lacking:
        return f"storage that stalls needs {', '.join(lacking)}"
    return "" if Path("/dev/loop-control").exists() else "there are no loop devices"


@dataclass(frozen=True)
class Stall:
    """When it began and ended, in seconds since the epoch."""

    begin: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class StallingStorage:
    """A file system at the same `place` on several machines."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._freezer: subprocess.Popen[str] | None = None
        self._begin = 0.0

    def stall(self) -> None:
        """From now on every write waits; what is there can still be read.

        It goes on at the latest when this process is gone.
        """
        script = 'fsfreeze --freeze "$1" && echo frozen && cat; fsfreeze --unfreeze "$1"'
        pipe = subprocess.PIPE
        self._freezer = subprocess.Popen(
            ["sh", "-c", script, "sh", str(self.place)],
            stdin=pipe,
            stdout=pipe,
            text=True,
            start_new_session=True,
        )
        assert self._freezer.stdout is not None
        assert self._freezer.stdout.readline() == "frozen\n"
        self._begin = time.time()

    def go_on(self) -> Stall:
        """All that waits is written."""
        assert self._freezer is not None, "it has not stalled"
        freezer, self._freezer = self._freezer, None
        freezer.communicate(timeout=scaled(60))
        return Stall(self._begin, time.time())

    def close(self) -> None:
        """Let it go on if it stalls."""
        if self._freezer is not None:
            self.go_on()


@contextmanager
def stalling_storage(
    cluster: Cluster, place: Path, machines: Sequence[str], disk: Path
) -> Iterator[StallingStorage]:
    """Storage at `place`, here and on these machines, on a new image file `disk`."""
    with disk.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(["mkfs.ext4", "-q", str(disk)], check=True)
    found = subprocess.run(
        ["losetup", "--find", "--show", str(disk)], check=True, text=True, stdout=subprocess.PIPE
    )
    device = found.stdout.strip()
    storage = StallingStorage(place)
    try:
        place.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", device, str(place)], check=True)
        for name in machines:
            cluster.run(name, "mount", device, str(place))
        yield storage
    finally:
        storage.close()
        for name in machines:  # lazily: a process that has a file open there is still ending
            cluster.run(name, "umount", "--lazy", str(place), check=False)
        subprocess.run(["umount", "--lazy", str(place)], check=False)
        subprocess.run(["losetup", "--detach", device], check=False)
