"""Imports a stock `torch.distributed.checkpoint` as the first commit of a run.

Every tensor is read without running what is in its container, checked against what `.metadata` says
of it, and written anew: in kempner's own containers, with checksums, and committed like any save.
Memory holds two of the largest stored part.

`.metadata` is a pickle, which the stock reader loads without restriction: a user who can write to a
checkpoint could run code in every job that resumes from it. Here only the classes that DCP itself
writes are allowed. Tensors are read by `torch.load(weights_only=True)`, as in the stock reader.

DCP flattens a nested state into keys joined by dots. What is obvious is taken: `model.<parameter>`
as it is; `optimizer` or `optim`, with or without `state` between (as `get_state_dict` of
`torch.distributed.checkpoint.state_dict` gives it); all of it below one more name, such as `app`.
"""

from __future__ import annotations

import gc
import io
import math
import pickle
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from kempner.checkpoint.convert.first_commit import commit_first, write_listed
from kempner.checkpoint.convert.tensor_copy import OnBytes
from kempner.checkpoint.format.manifest import NO_ATTEMPT, Identity, Manifest, TrainState
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.format.shard_plan import Chunk, Placed, TensorSpec
from kempner.run.process.exit_codes import DataError, cannot_read

_DCP = "torch.distributed.checkpoint"
_OF_METADATA = (
    *("Metadata", "MetadataIndex", "StorageMeta", "TensorStorageMetadata", "TensorProperties"),
    *("ChunkStorageMetadata", "BytesStorageMetadata", "_MEM_FORMAT_ENCODING"),
)
_LET_THROUGH = {
    *((f"{_DCP}.metadata", name) for name in _OF_METADATA),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


def _member(owner: Any, name: Any) -> Any:
    """A memory format, which Python writes as its value, and some releases of 3.11 by its name."""
    if owner is not _MEM_FORMAT_ENCODING or name not in _MEM_FORMAT_ENCODING.__members__:
        raise pickle.UnpicklingError("builtins.getattr is not allowed there")
    return _MEM_FORMAT_ENCODING[name]


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has it
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _LET_THROUGH or is_dtype:
            return super().find_class(module, name)
        if (module, name) in (("builtins", "getattr"), ("__builtin__", "getattr")):
            return _member
        raise pickle.UnpicklingError(f"{module}.{name} is not allowed there")


class RestrictedReader(FileSystemReader):
    """DCP's reader, but for a `.metadata` that asks for anything beyond DCP's own classes."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """The checkpoint's metadata. Raises `DataError` if it is no plain description of one."""
        path = Path(self.path) / METADATA
        try:
            with open(path, "rb") as file, _without_collector():
                metadata = _RestrictedUnpickler(file).load()
        except (pickle.UnpicklingError, EOFError, AttributeError, ValueError, TypeError) as error:
            raise DataError(f"{path} is refused: {error}") from error
        if not isinstance(metadata, Metadata):
            raise DataError(f"{path} is refused: it does not describe a checkpoint")
        metadata.storage_meta = metadata.storage_meta or StorageMeta()
        metadata.storage_meta.load_id = self.load_id
        return metadata


@contextmanager
def _without_collector() -> Iterator[None]:
    """Millions of objects that all stay: looking for garbage among them takes most of the time."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


_OPTIMIZERS = ("optimizer.", "optim.")
_GROUPS = "param_groups"
_WRAPPERS = {"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
"""What torch puts into the names of modules that it wraps."""


@dataclass(frozen=True)
class Fit:
    """`names` maps their keys to ours; `left_out` is what a run needs nothing of."""

    names: dict[str, str]
    left_out: tuple[str, ...]


def fit(tensors: Collection[str], others: Collection[str]) -> Fit:
    """Map the keys of `tensors`, and judge those of `others`, which are no tensors. Outside of
    model and optimizer everything is left out: schedules, counters and random states follow from
    the configuration and the step; so do the optimizer's groups. Raises `DataError`, naming keys,
    if something of the model or of the optimizer's state does not fit."""
    root = _root([*tensors, *others])
    names: dict[str, str] = {}
    left_out, misfits, taken = [], [], set()
    parameters = {
        _unwrapped(key.removeprefix(root)) for key in tensors if key.startswith(f"{root}model.")
    }
    for key in sorted({*tensors, *others}):
        ours, needed = _translate(_unwrapped(key.removeprefix(root)), parameters)
        if not key.startswith(root) or not needed:
            before, groups, _ = key.partition(_GROUPS)
            left_out.append(before + groups)
        elif ours is None or key in others or ours in taken:
            misfits.append(key)
        else:
            names[key] = ours
            taken.add(ours)
    if misfits:
        raise DataError(
            f"{listed(misfits)} cannot be imported: what belongs to the model must be a tensor, "
            "and what belongs to the optimizer a tensor that is called "
            "optimizer.state.<parameter>.<entry>, as get_state_dict of "
            "torch.distributed.checkpoint.state_dict calls it"
        )
    return Fit(names, tuple(dict.fromkeys(left_out)))


def listed(keys: Collection[str]) -> str:
    first = ", ".join(list(keys)[:3])
    return f"{first} and {len(keys) - 3} more" if len(keys) > 3 else first


def _root(keys: Iterable[str]) -> str:
    """What stands before `model.` in every key of the model: nothing, or one name and a dot."""
    keys = list(keys)
    if any(key.startswith("model.") for key in keys):
        return ""
    roots = {f"{parts[0]}." for key in keys if (parts := key.split("."))[1:2] == ["model"]}
    if len(roots) != 1:
        raise DataError(
            f"it has no keys model.<parameter>, but {listed(sorted(keys)) or 'none'}; save "
            '{"model": ..., "optimizer": ...} with torch.distributed.checkpoint'
        )
    return roots.pop()


def _unwrapped(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _translate(key: str, parameters: Collection[str]) -> tuple[str | None, bool]:
    """Our name for a key, if there is one, and whether the state would miss it without."""
    if key.startswith("model."):
        return key, True
    prefix = next((prefix for prefix in _OPTIMIZERS if key.startswith(prefix)), None)
    if prefix is None:
        return None, False
    rest = key.removeprefix(prefix)
    for name in (rest, rest.removeprefix("state.")):
        if f"model.{name.rpartition('.')[0]}" in parameters:
            return f"optimizer.{name}", True
    return None, not rest.startswith(_GROUPS)


_ADAMW = {"step", "exp_avg", "exp_avg_sq"}
"""The entries by which AdamW's state is known; those of others are not theirs alone."""


@dataclass(frozen=True)
class StockCheckpoint:
    path: Path
    metadata: Metadata
    fit: Fit

    @classmethod
    def open(cls, path: Path) -> StockCheckpoint:
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


def import_dcp(
    foreign: StockCheckpoint, into: Path, train_state: TrainState, on_bytes: OnBytes
) -> Path:
    """Commit a stock checkpoint as the first one of the folder `into`; return its path. Raises
    `DataError` if something in it is not a plain tensor, and as `commit_first`."""

    def write(path: Path) -> Manifest:
        found = [*foreign.files().items()]

        def read(number: int, placed: Sequence[Placed]) -> Iterator[Tensor]:
            name, parts = found[number]
            in_order = ((item.chunk, parts[item.chunk]) for item in placed)
            return _read_parts(foreign.path / name, in_order)

        cut = [parts.keys() for _, parts in found]
        files = write_listed(path, foreign.specs(), cut, read, on_bytes)
        identity = _what_is_known(foreign, len(found))
        return Manifest(train_state, identity, NO_ATTEMPT, time.time(), files)

    return commit_first(into, train_state.step, write)


def _what_is_known(foreign: StockCheckpoint, world: int) -> Identity:
    names = (name for name in foreign.fit.names.values() if name.startswith("optimizer."))
    entries = {name.rpartition(".")[2] for name in names}
    optimizer = "adamw" if entries == _ADAMW else None
    return Identity(world, {}, None, None, {}, optimizer)


def _read_parts(path: Path, parts: Iterable[tuple[Chunk, _StorageInfo]]) -> Iterator[Tensor]:
    """The tensors of one file in the order of `parts`, contiguous."""
    try:
        with open(path, "rb") as file:
            for chunk, stored in parts:
                yield _read_part(file, path, chunk, stored)
    except OSError as error:
        raise cannot_read(path, error) from error


def _assembled(spec: TensorSpec, parts: Iterable[tuple[Path, Chunk, _StorageInfo]]) -> Tensor:
    tensor = torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
    for path, chunk, stored in parts:
        box = zip(chunk.offsets, chunk.sizes, strict=True)
        where = tuple(slice(begin, begin + size) for begin, size in box)
        (tensor[where],) = _read_parts(path, [(chunk, stored)])
    return tensor


def _read_part(file: BinaryIO, path: Path, chunk: Chunk, stored: _StorageInfo) -> Tensor:
    if stored.transform_descriptors:
        raise DataError(f"{path} is compressed or encrypted, which kempner does not read")
    file.seek(stored.offset)
    content, where = io.BytesIO(file.read(stored.length)), f"{path}, byte {stored.offset}"
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
