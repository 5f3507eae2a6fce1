"""Reads DCP's files without executing their pickles.

`.metadata` is a pickle, which the stock reader loads as it is: whoever can write to a checkpoint
could run code in every job that resumes from it. Here only the classes that DCP itself writes are
let through. Tensors are read by `torch.load(weights_only=True)`, as the stock reader does.
"""

from __future__ import annotations

import gc
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    _MEM_FORMAT_ENCODING,
    Metadata,
    StorageMeta,
)

from kempner.checkpoint.format.names import METADATA
from kempner.run.process.exit_codes import DataError

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
