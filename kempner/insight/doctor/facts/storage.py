"""The disk for the checkpoints, and the run that is in the run directory already."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.run.process.exit_codes import RunError
from kempner.run.record import gave_up
from kempner.run.record.lease import is_owned
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class Disk:
    """Where the checkpoints go: `existing` is the nearest folder above it that is there.

    `inodes` is how many files may still be made, None where the file system has no such limit;
    `committed` is how many checkpoints are there already. `trouble` says why nothing is known.
    """

    folder: str
    existing: str
    free: int = 0
    inodes: int | None = None
    committed: int = 0
    trouble: str = ""
    newest: int | None = None
    """Bytes of the newest checkpoint; None before the first."""


@dataclass(frozen=True)
class RunState:
    """`gave_up` is why kempner gave the run up, empty if it did not; `running` is whether a
    supervisor lives, None where that cannot be told."""

    path: str
    gave_up: str = ""
    running: bool | None = False


def look_at_disk(folder: Path) -> Disk:
    """Read the facts of the disk, without writing anything."""
    existing = nearest(folder)
    try:
        free = shutil.disk_usage(existing).free
        system = os.statvfs(existing)
        # Some file systems make inodes as they are needed, and say that they have none at all.
        inodes = system.f_favail if system.f_files else None
        steps = CheckpointFolder(folder).committed() if folder.is_dir() else []
        newest = _bytes(CheckpointFolder(folder).step(steps[-1])) if steps else None
    except OSError as error:
        return Disk(str(folder), str(existing), trouble=error.strerror or str(error))
    return Disk(str(folder), str(existing), free, inodes, len(steps), newest=newest)


def _bytes(checkpoint: Path) -> int:
    return sum(file.stat().st_size for file in checkpoint.iterdir() if file.is_file())


def look_at_run(run: RunDirectory) -> RunState:
    """Takes seconds where a supervisor on another machine may live."""
    try:
        found = gave_up.read(run)
        given_up = "" if found is None else found.headline
    except (RunError, OSError) as error:
        given_up = str(error)
    try:
        running: bool | None = is_owned(run.supervisors)
    except (FileNotFoundError, NotADirectoryError):
        running = False
    except OSError:
        running = None
    return RunState(str(run.path), given_up, running)


def nearest(folder: Path) -> Path:
    """`folder`, or the nearest above it that is there."""
    whole = folder.absolute()
    return next((path for path in (whole, *whole.parents) if path.is_dir()), Path("/"))
