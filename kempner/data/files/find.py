"""Finds a prepared directory that a configuration names, whole or not at all."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from kempner.data.files.index import Index, Shard, read_index
from kempner.run.process.exit_codes import DataError
from kempner.run.process.retry import describe, empty, storage_waits

_LOOKS_AT_ONCE = 16
"""Token files whose sizes are asked for at a time: on a network file system each takes a while."""


def find_data(section: str, folder: str, worked: bool = False) -> Index:
    """The index of a prepared folder all of whose token files are there, in their sizes.

    `section` is the table whose dataset_path it is, `worked` whether the run has read it before.
    Raises `DataError`, and as `StorageWaits.retry` where it cannot be seen now.
    """
    try:
        index = read_index(Path(folder), worked)
        _check_sizes(Path(folder), index, worked)
    except DataError as error:
        raise DataError(f"{section}.dataset_path={folder}: {error}") from error
    return index


def _check_sizes(folder: Path, index: Index, worked: bool) -> None:
    def check(shard: Shard) -> None:
        path = folder / shard.file
        try:
            size = storage_waits().retry(partial(_size, path, shard.bytes if worked else 0), worked)
        except OSError as error:
            raise DataError(
                f"token file {describe(error)}; copy it from where the data was prepared, or "
                "prepare the data again"
            ) from error
        if size != shard.bytes:
            raise DataError(
                f"token file {path} has {size} bytes, the index says {shard.bytes}; copy it again "
                "from where the data was prepared, or prepare the data again"
            )

    with ThreadPoolExecutor(_LOOKS_AT_ONCE, "sizes") as pool:
        for _ in pool.map(check, index.shards):
            pass


def _size(path: Path, expected: int) -> int:
    """Raises `OSError`, also if the file is empty and `expected` is not 0."""
    size = path.stat().st_size
    if expected and not size:
        raise empty(path, expected)
    return size
