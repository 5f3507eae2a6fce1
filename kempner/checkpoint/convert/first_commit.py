"""Commits tensors from another format as the first checkpoint of a run.

The source decides how its tensors are cut; containers, checksums and both indexes are written here.
Memory holds what one step of the reader gives.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor

from kempner.checkpoint.convert.tensor_copy import OnBytes, copy_data_file, copy_small_file, octets
from kempner.checkpoint.format.compact_index import INDEX, ListedIndex, ListedPart, encode_listed
from kempner.checkpoint.format.contents import Saved
from kempner.checkpoint.format.manifest import (
    NO_ATTEMPT,
    FileEntry,
    Manifest,
    TrainState,
    encode_sidecar,
    entry_of,
    sidecar_name,
    sum_file,
)
from kempner.checkpoint.format.names import METADATA, CheckpointFolder, in_progress_name
from kempner.checkpoint.format.shard_plan import (
    Chunk,
    Placed,
    TensorSpec,
    data_file,
    file_length,
    listed,
)
from kempner.checkpoint.io.file_writer import reserve, write_all
from kempner.checkpoint.store import commit
from kempner.checkpoint.tensors.dcp_metadata import pack
from kempner.checkpoint.tensors.file_buffer import container
from kempner.run.process.durable_io import write_durable
from kempner.run.process.exit_codes import UsageError
from kempner.run.record.attempts import Attempt


@dataclass(frozen=True)
class _FirstCommitFence:
    """Stands where an attempt's fence stands in a save: nothing else may have been committed."""

    folder: CheckpointFolder
    step: int
    attempt: Attempt

    def check(self) -> None:
        if self.folder.latest() is not None or set(self.folder.committed()) - {self.step}:
            raise UsageError(
                f"{self.folder.path} has checkpoints already; import into a run that has none"
            )


def commit_first(into: Path, step: int, write: Callable[[Path], Manifest]) -> Path:
    """Commit what `write` puts into the folder that it is given, as the checkpoint of `step`.
    Returns its path below `into`. Raises `UsageError` if `into` has a checkpoint, `OSError` for
    what cannot be written, and what `write` raises; nothing is left then."""
    folder = CheckpointFolder(into)
    attempt = Attempt(NO_ATTEMPT, secrets.token_hex(4))
    guard = _FirstCommitFence(folder, step, attempt)
    guard.check()
    path = into / in_progress_name(step, attempt.number, attempt.nonce)
    path.mkdir(parents=True)
    try:
        return commit.commit(folder, path, write(path), guard, lambda sentence: None)
    except BaseException:
        shutil.rmtree(path, ignore_errors=True)  # the next attempt sweeps what cannot go now
        raise


Reader = Callable[[int, Sequence[Placed]], Iterator[Tensor]]
"""The contiguous tensors of a file, by its number, in the order of what is placed there."""


def write_listed(
    path: Path,
    specs: Sequence[TensorSpec],
    files: Sequence[Collection[Chunk]],
    read: Reader,
    on_bytes: OnBytes,
) -> dict[str, FileEntry]:
    """Write `specs` into the folder `path`, cut and dealt out over files as `files` says. Returns
    what the manifest says of every file. How a spec is cut, `files` alone decides. Raises `OSError`
    for what cannot be written, and what `read` raises."""
    written: dict[str, FileEntry] = {}
    contents = []
    index = _index(specs, files)
    for number in range(len(files)):
        placed = index.placed(number)
        contents.append(listed(placed))
        target = path / data_file(number)
        _write_file(target, placed, read(number, placed), on_bytes)
        sums = sum_file(target)
        written[target.name] = FileEntry(sums.bytes, sums=sidecar_name(number))
        sidecar = encode_sidecar({target.name: sums})
        written |= _write_small(path / sidecar_name(number), sidecar)
    written |= _write_small(path / METADATA, pack(list(specs), contents))
    return written | _write_small(path / INDEX, encode_listed(index))


def _index(specs: Sequence[TensorSpec], files: Sequence[Collection[Chunk]]) -> ListedIndex:
    """What will be where: the parts of each file, as they were cut."""
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in specs}
    pieces: dict[str, list[ListedPart]] = {key: [] for key in tensors}
    for number, parts in enumerate(files):
        for part in parts:
            pieces[part.key].append(ListedPart(number, part.offsets, part.sizes))
    return ListedIndex.of(tensors, pieces, container)


def _write_small(path: Path, content: bytes) -> dict[str, FileEntry]:
    write_durable(path, content)
    return {path.name: entry_of(content)}


def _write_file(
    path: Path, placed: Sequence[Placed], tensors: Iterator[Tensor], on_bytes: OnBytes
) -> None:
    with open(path, "xb", buffering=0) as file:
        descriptor = file.fileno()
        reserve(descriptor, file_length(placed))
        for item, tensor in zip(placed, tensors, strict=True):
            at = item.start
            around = container(item.chunk.dtype, item.chunk.sizes)
            for content in (around.before, octets(tensor), around.after):
                write_all(descriptor, memoryview(content), at)
                at += len(content)
            on_bytes(tensor.nbytes)
        os.fsync(descriptor)


def place_of(manifest: Manifest, step: int | None, cursor: int | None) -> Manifest:
    """The manifest of the import: that of the checkpoint, unless another place is asked for.
    Another step or cursor is another place in the data, so that nothing holds any more of what was
    counted up to here, and data and seed are free."""
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
    Every byte is checked. Raises `DataError` for damage, and as `commit_first`."""

    def write(path: Path) -> Manifest:
        for name, entry in manifest.files.items():
            if entry.sums is None:
                copy_small_file(checkpoint, manifest, name, path / name)
            else:
                copy_data_file(checkpoint, manifest, name, path / name, on_bytes)
        return replace(manifest, attempt=NO_ATTEMPT, created=time.time())

    return commit_first(into, manifest.train_state.step, write)
