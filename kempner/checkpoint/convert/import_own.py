"""Imports a checkpoint of kempner's own as the first commit of another run."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path

from kempner.checkpoint.convert.file_copy import copy_data_file, copy_small_file
from kempner.checkpoint.convert.first_commit import NO_ATTEMPT, commit_first
from kempner.checkpoint.convert.tensor_copy import OnBytes
from kempner.checkpoint.format.manifest import Manifest
from kempner.checkpoint.format.train_state import TrainState


def place_of(manifest: Manifest, step: int | None, cursor: int | None) -> Manifest:
    """The manifest of the import: that of the checkpoint, unless another place is asked for.

    Another step or cursor is another place in the data, so that nothing holds any more of what was
    counted up to here, and data and seed are free.
    """
    if step is None and cursor is None:
        return manifest
    before = manifest.train_state
    elsewhere = TrainState(
        before.step if step is None else step, before.cursor if cursor is None else cursor
    )
    identity = replace(manifest.identity, seed=None, data_fingerprint=None)
    return replace(manifest, train_state=elsewhere, identity=identity)


def import_own(checkpoint: Path, manifest: Manifest, into: Path, on_bytes: OnBytes) -> Path:
    """Copy a checkpoint with a manifest, as the first one of the folder `into`; return its path.

    Every byte is checked. Raises `DataError` for damage, and as `commit_first`.
    """

    def write(path: Path) -> Manifest:
        for name, entry in manifest.files.items():
            if entry.sums is None:
                copy_small_file(checkpoint, manifest, name, path / name)
            else:
                copy_data_file(checkpoint, manifest, name, path / name, on_bytes)
        return replace(manifest, attempt=NO_ATTEMPT, created=time.time())

    return commit_first(into, manifest.train_state.step, write)
