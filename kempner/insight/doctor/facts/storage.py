"""Facts about the disk for checkpoints, a run in the run directory, and the configured data."""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.data.files.index import INDEX_FILE, Index, find_data, tokenizer_file
from kempner.run.process.exit_codes import RunError
from kempner.run.record import gave_up
from kempner.run.record.lease import is_owned
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class Disk:
    """The folder for checkpoints; `existing` is the nearest existing folder above it. `inodes` is
    how many files may still be created, None without a limit, `committed` the number of checkpoints
    there. `trouble` says why nothing is known."""

    folder: str
    existing: str
    free: int = 0
    inodes: int | None = None
    committed: int = 0
    trouble: str = ""
    newest: int | None = None  # bytes of the newest checkpoint; None before the first


@dataclass(frozen=True)
class RunState:
    """`gave_up` says why kempner gave the run up, empty if it did not; `running`: a supervisor is
    alive, None if unknown."""

    path: str
    gave_up: str = ""
    running: bool | None = False


def look_at_disk(folder: Path) -> Disk:
    existing = nearest(folder)
    try:
        free = shutil.disk_usage(existing).free
        system = os.statvfs(existing)
        # Some file systems create inodes on demand, and report none at all.
        inodes = system.f_favail if system.f_files else None
        steps = CheckpointFolder(folder).committed() if folder.is_dir() else []
        files = CheckpointFolder(folder).step(steps[-1]).iterdir() if steps else ()
        newest = sum(f.stat().st_size for f in files if f.is_file()) if steps else None
    except OSError as error:
        return Disk(str(folder), str(existing), trouble=error.strerror or str(error))
    return Disk(str(folder), str(existing), free, inodes, len(steps), newest=newest)


def look_at_run(run: RunDirectory) -> RunState:
    """Takes seconds if a supervisor on another machine may be alive."""
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
    whole = folder.absolute()
    return next((path for path in (whole, *whole.parents) if path.is_dir()), Path("/"))


_AT_ONCE = 16  # token files opened at a time


@dataclass(frozen=True)
class DataSet:
    """The prepared folder that the configuration's `key` names. If it cannot be used, `index` is
    None and `trouble` says why. `unreadable` is a sentence about its token files, `tokenizer` about
    its tokenizer; empty if all is well."""

    key: str
    folder: str
    index: Index | None
    trouble: str = ""
    unreadable: str = ""
    tokenizer: str = ""

    @property
    def marker(self) -> str:
        return str((Path(self.folder) / INDEX_FILE).absolute())


def find_data_set(key: str, folder: str) -> DataSet:
    """Examine the folder that `key` names; opens every token file."""
    try:
        index = find_data(key, folder)
    except RunError as error:
        return DataSet(key, folder, None, str(error))
    try:
        tokenizer_file(Path(folder))
        tokenizer = ""
    except RunError as error:
        tokenizer = f"{key}={folder}: {error}"
    return DataSet(key, folder, index, "", _unreadable(key, Path(folder), index), tokenizer)


def _unreadable(key: str, folder: Path, index: Index) -> str:
    files = (folder / shard.file for shard in index.shards)
    with ThreadPoolExecutor(_AT_ONCE, "open") as pool:
        found = [why for why in pool.map(_try_to_read, files) if why]
    if not found:
        return ""
    more = f" (and {len(found) - 1} more)" if found[1:] else ""
    return f"{key}={folder}: {found[0]}{more}; ask the owner for the right to read it"


def _try_to_read(file: Path) -> str:
    try:
        with open(file, "rb", buffering=0) as opened:
            opened.read(1)
    except OSError as error:
        return f"token file {file} cannot be read: {error.strerror}"
    return ""
