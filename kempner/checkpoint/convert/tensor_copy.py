"""Copies whole tensors of a checkpoint into other files, a few at a time.

A format says which bytes go before, between and after the tensors; the tensors' own bytes are read,
checked and written in batches, so that memory holds one batch, or one tensor if that is larger.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from kempner.checkpoint.format.contents import Contents, Saved
from kempner.checkpoint.format.manifest import Manifest, read
from kempner.checkpoint.io.file_writer import reserve, write_all
from kempner.checkpoint.tensors.load import fill
from kempner.checkpoint.tensors.open_contents import open_contents

BATCH_BYTES = 256 << 20
"""Tensors that are read together, so that small ones do not cost a file opened each."""

OnBytes = Callable[[int], None]
"""Told how many bytes more of tensors are done."""


@dataclass(frozen=True)
class Slot:
    """Where in a file the bytes of the tensor `key` begin, and as what it is written there.

    It may be of another floating-point type than in the checkpoint, and without the last rows.
    """

    key: str
    at: int
    written: Saved


@dataclass(frozen=True)
class Source:
    """A checkpoint to take tensors from."""

    path: Path
    manifest: Manifest
    contents: Contents

    @classmethod
    def open(cls, checkpoint: Path) -> Source:
        """Raises `DataError` if the checkpoint is damaged where it describes itself."""
        manifest = read(checkpoint)
        return cls(checkpoint, manifest, open_contents(checkpoint, manifest))

    def read(self, keys: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors in the order of `keys`. Raises `DataError` for what is damaged."""
        for batch in self._batches(keys):
            table = {key: _empty(self.contents.tensors[key]) for key in batch}
            fill(table, self.path, self.manifest, self.contents)
            for key in batch:
                yield key, table.pop(key)  # so that two batches are never in memory

    def _batches(self, keys: Iterable[str]) -> Iterator[list[str]]:
        batch: list[str] = []
        held = 0
        for key in keys:
            size = length(self.contents.tensors[key])
            if batch and held + size > BATCH_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(key)
            held += size
        if batch:
            yield batch


def length(saved: Saved) -> int:
    """Bytes of a whole tensor."""
    return math.prod(saved.shape) * dtype_of(saved).itemsize


def dtype_of(saved: Saved) -> torch.dtype:
    """A tensor's dtype."""
    dtype = getattr(torch, saved.dtype)
    assert isinstance(dtype, torch.dtype)  # whoever described the contents has seen to it
    return dtype


def total(tensors: Mapping[str, Saved]) -> int:
    """Bytes of all tensors."""
    return sum(map(length, tensors.values()))


def pour(path: Path, slots: Sequence[Slot], source: Source, on_bytes: OnBytes) -> None:
    """Write tensors into their slots of the file at `path`, which has its length; fsync it.

    Raises `DataError` for damage in the checkpoint and `OSError` for what cannot be written.
    """
    descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
    try:
        reserve(descriptor, os.fstat(descriptor).st_size)
        places = {slot.key: slot for slot in slots}
        for key, tensor in source.read(places):
            slot = places[key]
            write_all(descriptor, octets(_fitted(tensor, slot.written)), slot.at)
            on_bytes(tensor.nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def octets(tensor: Tensor) -> memoryview:
    """The bytes of a contiguous tensor."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _fitted(tensor: Tensor, written: Saved) -> Tensor:
    """The tensor in the type, and without the last rows, in which it is written."""
    if tuple(tensor.shape) != written.shape:
        tensor = tensor[: written.shape[0]]
    return tensor.to(dtype_of(written))


def _empty(saved: Saved) -> Tensor:
    return torch.empty(saved.shape, dtype=dtype_of(saved))
