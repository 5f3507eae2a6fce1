"""Reads DCP's files without executing their pickles.

`.metadata` is a pickle, which the stock reader loads as it is: whoever can write to a checkpoint
could run code in every job that resumes from it. Here only the classes that DCP itself writes are
let through. Tensors are read by `torch.load(weights_only=True)`, as the stock reader does.
"""

from __future__ import annotations

import gc
import pickle
import platform
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)

from kempner.checkpoint.format.compact_index import INDEX, CompactIndex, decode
from kempner.checkpoint.format.contents import Contents, Part, Saved, overlap
from kempner.checkpoint.format.manifest import Manifest
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.io.patient_reads import read_listed
from kempner.checkpoint.io.verify import verify_files
from kempner.checkpoint.tensors.file_buffer import container
from kempner.run.process.durable_io import await_entry
from kempner.run.process.exit_codes import DataError, NotSharedError
from kempner.run.process.retry import storage_waits

_DCP = "torch.distributed.checkpoint"
_LET_THROUGH = {
    (f"{_DCP}.metadata", "Metadata"),
    (f"{_DCP}.metadata", "MetadataIndex"),
    (f"{_DCP}.metadata", "StorageMeta"),
    (f"{_DCP}.metadata", "TensorStorageMetadata"),
    (f"{_DCP}.metadata", "TensorProperties"),
    (f"{_DCP}.metadata", "ChunkStorageMetadata"),
    (f"{_DCP}.metadata", "BytesStorageMetadata"),
    (f"{_DCP}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_DCP}.filesystem", "_StorageInfo"),
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("collections", "OrderedDict"),
}


class _RestrictedUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if module == "pathlib._local":  # where Python 3.13 has it
            module = "pathlib"
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if (module, name) in _LET_THROUGH or is_dtype:
            return super().find_class(module, name)
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


class StockContents:
    """What DCP's `.metadata` says that a checkpoint holds; only its tensors."""

    def __init__(self, metadata: Metadata) -> None:
        self._storage = metadata.storage_data
        self._chunks = {
            key: entry.chunks
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }
        self.tensors = {
            key: Saved(tuple(entry.size), str(entry.properties.dtype).removeprefix("torch."))
            for key, entry in metadata.state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
        """The stored parts that overlap a box; see `Contents`."""
        for number, chunk in enumerate(self._chunks[key]):
            if overlap(offsets, sizes, chunk.offsets, chunk.sizes) is None:
                continue
            stored = self._storage.get(MetadataIndex(key, chunk.offsets, number))
            if stored is None:
                raise DataError(f"{key}: the part at {tuple(chunk.offsets)} is not stored")
            yield Part(
                tuple(chunk.offsets),
                tuple(chunk.sizes),
                stored.relative_path,
                stored.offset,
                stored.length,
            )


def open_contents(checkpoint: Path, manifest: Manifest) -> Contents:
    """What a checkpoint holds. Raises `DataError` unless that is as the manifest says.

    A rank may see the folder later than rank 0, which has chosen it: that is waited for. One that
    never does raises `NotSharedError`: the checkpoint is no worse for it. Where nothing is seen of
    the folder that it is in, storage is away, and waited for.
    """
    storage_waits().retry(partial(_await_folder, checkpoint), worked=True)
    name = INDEX if INDEX in manifest.files else METADATA
    for damage in verify_files(checkpoint, manifest, [name]):
        raise DataError(str(damage))
    if name == INDEX:
        return read_listed(checkpoint / INDEX, partial(_read_index, checkpoint / INDEX))
    reader = RestrictedReader(checkpoint)
    return StockContents(read_listed(checkpoint / METADATA, reader.read_metadata))


def _await_folder(checkpoint: Path) -> None:
    """Raises `OSError` if its storage is away, and `NotSharedError` if it alone is not there."""
    checkpoint.parent.stat()
    if not await_entry(checkpoint):
        checkpoint.parent.stat()
        raise NotSharedError(
            f"{checkpoint} is not visible on {platform.node()}, although rank 0 has chosen it: is "
            "it on a file system that all nodes share?"
        )


def _read_index(path: Path) -> CompactIndex:
    specs, world = decode(path.read_bytes(), path)
    for spec in specs:
        if not isinstance(getattr(torch, spec.dtype, None), torch.dtype):
            raise DataError(f"{path} is damaged: {spec.key} is {spec.dtype}, which is not a dtype")
    return CompactIndex(specs, world, container)
