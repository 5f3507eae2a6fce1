"""Builds DCP's `.metadata` from a state's specs; for a large world in a separate process.

At 512 ranks it lists more than a million chunks. Building it holds the interpreter's lock, and
would delay training for as long."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from kempner.checkpoint.format.shard_plan import ListedChunk, TensorSpec, data_file, list_all
from kempner.checkpoint.tensors.file_buffer import container, page_aligned
from kempner.run.process.signals import follow_parent, stop_signals_blocked
from kempner.run.process.worker_process import SAFE_MODULE

MADE_HERE = 20_000
"""The most chunks for which `.metadata` is built in the calling process, in about 0.1 s."""

_DCP_VERSION = "1.0.0"


def metadata_of(specs: Sequence[TensorSpec], world: int) -> memoryview:
    """`build_metadata`, in a separate process if it would take long; page-aligned for direct I/O,
    since it may be hundreds of megabytes. Blocks the calling thread without holding the
    interpreter's lock. Raises `RuntimeError` with the process's last line if it fails."""
    if len(specs) * world <= MADE_HERE:
        content = build_metadata(specs, world)
        aligned = page_aligned(len(content)).numpy().data
        aligned[:] = content
        return aligned
    with stop_signals_blocked():  # a signal to the process group must not fail a save
        return _build_in_process(specs, world)


def build_metadata(specs: Sequence[TensorSpec], world: int) -> bytes:
    """The `.metadata` of a state that `world` ranks write; the same bytes at every save."""
    return pack(specs, list_all(specs, world, container))


def pack(specs: Sequence[TensorSpec], files: Iterable[Sequence[ListedChunk]]) -> bytes:
    """The `.metadata` of tensors whose parts are in `files`, one per rank."""
    chunks: dict[str, list[ChunkStorageMetadata]] = {spec.key: [] for spec in specs}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    for rank, contents in enumerate(files):
        file = data_file(rank)
        for key, offsets, sizes, start, length in contents:
            described = _describe(offsets, sizes)
            index = MetadataIndex(key, described.offsets, len(chunks[key]))
            chunks[key].append(described)
            storage[index] = _StorageInfo(file, start, length)
    metadata = Metadata(
        state_dict_metadata={spec.key: _tensor(spec, chunks[spec.key]) for spec in specs},
        planner_data={spec.key: (spec.key,) for spec in specs},
        storage_data=storage,
        storage_meta=StorageMeta(),
        version=_DCP_VERSION,
    )
    return pickle.dumps(metadata)


def _tensor(spec: TensorSpec, chunks: list[ChunkStorageMetadata]) -> TensorStorageMetadata:
    properties = TensorProperties(dtype=getattr(torch, spec.dtype))
    return TensorStorageMetadata(properties, torch.Size(spec.shape), chunks)


@lru_cache(1 << 12)
def _describe(offsets: tuple[int, ...], sizes: tuple[int, ...]) -> ChunkStorageMetadata:
    """Cached, so that a pickle stores the object once for all tensors that are cut alike."""
    return ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=_size(sizes))


@lru_cache(1 << 12)
def _size(sizes: tuple[int, ...]) -> torch.Size:
    return torch.Size(sizes)


def _build_in_process(specs: Sequence[TensorSpec], world: int) -> memoryview:
    command = [sys.executable, *SAFE_MODULE, __name__, str(os.getpid())]
    with tempfile.TemporaryFile(buffering=0) as made, tempfile.TemporaryFile() as words:
        ended = subprocess.run(
            command,
            input=pickle.dumps((list(specs), world)),
            stdout=made,
            stderr=words,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        if ended.returncode != 0:
            words.seek(0)
            last = words.read().decode(errors="replace").strip().splitlines()[-1:]
            raise RuntimeError(f"planning ended with {ended.returncode}: {''.join(last)}")
        aligned = page_aligned(made.seek(0, os.SEEK_END)).numpy().data
        made.seek(0)
        done = 0
        while count := made.readinto(aligned[done:]):
            done += count
        return aligned


def _main() -> None:
    """Read specs and world from the parent, and write `.metadata`; both are pickles."""
    follow_parent(int(sys.argv[1]), signal.SIGKILL)
    os.nice(19)
    gc.disable()  # there is no garbage, and collecting takes longer than the work
    specs, world = pickle.load(sys.stdin.buffer)
    sys.stdout.buffer.write(build_metadata(specs, world))


if __name__ == "__main__":
    _main()
