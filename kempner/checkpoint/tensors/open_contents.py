"""Opens a checkpoint: reads its index, and checks what no load of a tensor reads."""

from __future__ import annotations

import platform
from functools import partial
from pathlib import Path

import torch

from kempner.checkpoint.format.compact_index import INDEX, decode
from kempner.checkpoint.format.contents import Contents
from kempner.checkpoint.format.manifest import Manifest, rank_of
from kempner.checkpoint.io.verify import read_whole, verify_files
from kempner.run.process.durable_io import await_entry
from kempner.run.process.exit_codes import DataError, NotSharedError
from kempner.run.process.retry import storage_waits


def open_contents(checkpoint: Path, manifest: Manifest, rank: int = 0, world: int = 1) -> Contents:
    """What a checkpoint holds. Raises `DataError` unless that is as the manifest says.

    Of the files that nobody needs, `.metadata` among them, each rank of a `world` that loads
    together checks its share, so that between them they read every block of every file.

    A rank may see the folder later than rank 0, which has chosen it: that is waited for. One that
    never does raises `NotSharedError`: the checkpoint is no worse for it. Where nothing is seen of
    the folder that it is in, storage is away, and waited for.
    """
    storage_waits().retry(partial(_await_folder, checkpoint), worked=True)
    contents = _read_index(checkpoint / INDEX, manifest)
    for damage in verify_files(checkpoint, manifest, _needless_files(manifest)[rank::world]):
        raise DataError(str(damage))
    return contents


def _await_folder(checkpoint: Path) -> None:
    """Raises `OSError` if its storage is away, and `NotSharedError` if it alone is not there."""
    checkpoint.parent.stat()
    if not await_entry(checkpoint):
        checkpoint.parent.stat()
        raise NotSharedError(
            f"{checkpoint} is not visible on {platform.node()}, although rank 0 has chosen it: is "
            "it on a file system that all nodes share?"
        )


def _read_index(path: Path, manifest: Manifest) -> Contents:
    if INDEX not in manifest.files:
        raise DataError(f"{INDEX}: is not in the manifest")
    try:
        content = read_whole(path, manifest.files[INDEX])
    except DataError as error:
        raise DataError(f"{INDEX}: {error}") from error
    index = decode(content, path)
    for key, saved in index.tensors.items():
        if not isinstance(getattr(torch, saved.dtype, None), torch.dtype):
            raise DataError(f"{path} is damaged: {key} is {saved.dtype}, which is not a dtype")
    return index


def _needless_files(manifest: Manifest) -> list[str]:
    """What no tensor is read from: files of ranks that had nothing to write, and `.metadata`."""
    return [
        name
        for name, entry in manifest.files.items()
        if (entry.sums and entry.bytes == 0) or (rank_of(name, entry) is None and name != INDEX)
    ]
