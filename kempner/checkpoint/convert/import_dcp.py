"""Imports a stock `torch.distributed.checkpoint` as the first commit of a run.

Every tensor is read without running what is in its container, checked against what `.metadata` says
of it, and written anew: in kempner's own containers, with checksums, and committed like any save.
Memory holds two of the largest stored part.
"""

from __future__ import annotations

import io
import math
import pickle
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from kempner.checkpoint.convert.dcp_reader import RestrictedReader
from kempner.checkpoint.convert.first_commit import NO_ATTEMPT, commit_first
from kempner.checkpoint.convert.key_map import Fit, fit
from kempner.checkpoint.convert.tensor_copy import OnBytes
from kempner.checkpoint.convert.write_listed import write_listed
from kempner.checkpoint.format.manifest import FileEntry, Identity, Manifest
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.format.shard_plan import Chunk, Placed, TensorSpec
from kempner.checkpoint.format.train_state import TrainState
from kempner.run.process.exit_codes import DataError, cannot_read

_ADAMW = {"step", "exp_avg", "exp_avg_sq"}
"""The entries by which AdamW's state is known; those of others are not theirs alone."""


@dataclass(frozen=True)
class Foreign:
    """A stock checkpoint whose keys fit."""

    path: Path
    metadata: Metadata
    fit: Fit

    @classmethod
    def open(cls, path: Path) -> Foreign:
        """Raises `DataError` if there is no stock checkpoint, or its keys do not fit."""
        try:
            metadata = RestrictedReader(path).read_metadata()
        except OSError as error:
            advice = "name the folder that torch.distributed.checkpoint wrote"
            raise cannot_read(path / METADATA, error, advice) from error
        entries = metadata.state_dict_metadata
        tensors = {k for k, entry in entries.items() if isinstance(entry, TensorStorageMetadata)}
        try:
            return cls(path, metadata, fit(tensors, entries.keys() - tensors))
        except DataError as error:
            raise DataError(f"{path}: {error}") from error

    def specs(self) -> list[TensorSpec]:
        """The tensors under our names; how they were cut, the parts say."""
        return [
            TensorSpec(ours, tuple(entry.size), _dtype_name(entry), (1,), (None,))
            for ours, entry in ((ours, self._entry(key)) for key, ours in self.fit.names.items())
        ]

    def files(self) -> dict[str, dict[Chunk, _StorageInfo]]:
        """What is stored where: file, then part under our name. Raises `DataError` for gaps."""
        found: dict[str, dict[Chunk, _StorageInfo]] = {}
        for key, ours in self.fit.names.items():
            entry, elements = self._entry(key), 0
            for number, chunk in enumerate(entry.chunks):
                stored = self.metadata.storage_data.get(MetadataIndex(key, chunk.offsets, number))
                if stored is None or Path(stored.relative_path).name != stored.relative_path:
                    raise DataError(f"{self.path}: {key} is not stored in this folder")
                part = Chunk(ours, tuple(chunk.offsets), tuple(chunk.sizes), _dtype_name(entry))
                found.setdefault(stored.relative_path, {})[part] = stored
                elements += math.prod(chunk.sizes)
            if elements != math.prod(entry.size):
                raise DataError(f"{self.path}: {key} does not have all of its elements")
        return dict(sorted(found.items()))

    def read(self, names: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        """Whole tensors by our names, in their order. Raises `DataError` as `import_dcp`."""
        specs = {spec.key: spec for spec in self.specs()}
        parts: dict[str, list[tuple[Path, Chunk, _StorageInfo]]] = {name: [] for name in specs}
        for file, stored in self.files().items():
            for chunk, info in stored.items():
                parts[chunk.key].append((self.path / file, chunk, info))
        for name in names:
            yield name, _assembled(specs[name], parts[name])  # no tensor is kept here

    def _entry(self, key: str) -> TensorStorageMetadata:
        entry = self.metadata.state_dict_metadata[key]
        assert isinstance(entry, TensorStorageMetadata)  # `fit` lets only those through
        return entry


def import_dcp(foreign: Foreign, into: Path, train_state: TrainState, on_bytes: OnBytes) -> Path:
    """Commit a stock checkpoint as the first one of the folder `into`; return its path.

    Raises `DataError` if something in it is not a plain tensor, and as `commit_first`.
    """

    def write(path: Path) -> Manifest:
        files = _write(foreign, path, on_bytes)
        world = sum(entry.sums is not None for entry in files.values())
        identity = _what_is_known(foreign, world)
        return Manifest(train_state, identity, NO_ATTEMPT, time.time(), files)

    return commit_first(into, train_state.step, write)


def _what_is_known(foreign: Foreign, world: int) -> Identity:
    names = (name for name in foreign.fit.names.values() if name.startswith("optimizer."))
    entries = {name.rpartition(".")[2] for name in names}
    return Identity(
        world=world,
        mesh={},
        seed=None,
        data_fingerprint=None,
        model={},
        optimizer="adamw" if entries == _ADAMW else None,
    )


def _write(foreign: Foreign, path: Path, on_bytes: OnBytes) -> dict[str, FileEntry]:
    found = [*foreign.files().items()]

    def read(number: int, placed: Sequence[Placed]) -> Iterator[Tensor]:
        name, parts = found[number]
        return _read_parts(foreign.path / name, placed, parts)

    return write_listed(path, foreign.specs(), [parts.keys() for _, parts in found], read, on_bytes)


def _read_parts(
    path: Path, placed: Sequence[Placed], parts: Mapping[Chunk, _StorageInfo]
) -> Iterator[Tensor]:
    """The tensors of one file in the order of `placed`, contiguous."""
    try:
        with open(path, "rb") as file:
            for item in placed:
                yield _read_part(file, path, item.chunk, parts[item.chunk])
    except OSError as error:
        raise cannot_read(path, error) from error


def _assembled(spec: TensorSpec, parts: Iterable[tuple[Path, Chunk, _StorageInfo]]) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for path, chunk, stored in parts:
        box = zip(chunk.offsets, chunk.sizes, strict=True)
        where = tuple(slice(begin, begin + size) for begin, size in box)
        tensor[where] = _read_alone(path, chunk, stored)
    return tensor


def _read_alone(path: Path, chunk: Chunk, stored: _StorageInfo) -> Tensor:
    try:
        with open(path, "rb") as file:
            return _read_part(file, path, chunk, stored)
    except OSError as error:
        raise cannot_read(path, error) from error


def _read_part(file: BinaryIO, path: Path, chunk: Chunk, stored: _StorageInfo) -> Tensor:
    if stored.transform_descriptors:
        raise DataError(f"{path} is compressed or encrypted, which kempner does not read")
    file.seek(stored.offset)
    content = io.BytesIO(file.read(stored.length))
    return _tensor(content, chunk, f"{path}, byte {stored.offset}")


def _tensor(content: io.BytesIO, chunk: Chunk, where: str) -> Tensor:
    try:
        tensor = torch.load(content, map_location="cpu", weights_only=True)
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, KeyError) as error:
        raise DataError(f"{where}: {chunk.key} is refused: it is not a plain tensor") from error
    if type(tensor) is not Tensor or tensor.layout != torch.strided:
        raise DataError(f"{where}: {chunk.key} is refused: it is not a plain tensor")
    if (f"torch.{chunk.dtype}", chunk.sizes) != (str(tensor.dtype), tuple(tensor.shape)):
        raise DataError(f"{where}: {chunk.key} does not have the expected dtype and shape")
    return tensor.contiguous()


def _dtype_name(entry: TensorStorageMetadata) -> str:
    return str(entry.properties.dtype).removeprefix("torch.")
