"""Writes a checkpoint whose tensors somebody else has cut: containers, checksums and both indexes.

Memory holds what one step of the reader gives.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path

from torch import Tensor

from kempner.checkpoint.convert.tensor_copy import OnBytes, octets
from kempner.checkpoint.format.compact_index import INDEX, encode_listed
from kempner.checkpoint.format.contents import Saved
from kempner.checkpoint.format.listed_index import ListedIndex, Piece
from kempner.checkpoint.format.manifest import (
    FileEntry,
    encode_sidecar,
    sidecar_name,
    sum_file,
    whole_sum,
)
from kempner.checkpoint.format.names import METADATA
from kempner.checkpoint.format.shard_plan import (
    Chunk,
    Placed,
    TensorSpec,
    data_file,
    file_length,
    listed,
)
from kempner.checkpoint.io.file_writer import reserve, write_all
from kempner.checkpoint.tensors.dcp_metadata import pack
from kempner.checkpoint.tensors.file_buffer import container
from kempner.run.process.durable_io import write_durable

Reader = Callable[[int, Sequence[Placed]], Iterator[Tensor]]
"""The contiguous tensors of a file, by its number, in the order of what is placed there."""


def write_listed(
    path: Path,
    specs: Sequence[TensorSpec],
    files: Sequence[Collection[Chunk]],
    read: Reader,
    on_bytes: OnBytes,
) -> dict[str, FileEntry]:
    """Write `specs` into the folder `path`, cut and dealt out over files as `files` says.

    Returns what the manifest says of every file. How a spec is cut, `files` alone decides. Raises
    `OSError` for what cannot be written, and what `read` raises.
    """
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
    pieces: dict[str, list[Piece]] = {key: [] for key in tensors}
    for number, parts in enumerate(files):
        for part in parts:
            pieces[part.key].append(Piece(number, part.offsets, part.sizes))
    return ListedIndex.of(tensors, pieces, container)


def _write_small(path: Path, content: bytes) -> dict[str, FileEntry]:
    write_durable(path, content)
    return {path.name: FileEntry(len(content), xxh3_128=whole_sum(content))}


def _write_file(
    path: Path, placed: Sequence[Placed], tensors: Iterator[Tensor], on_bytes: OnBytes
) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
    try:
        reserve(descriptor, file_length(placed))
        for item, tensor in zip(placed, tensors, strict=True):
            at = item.start
            around = container(item.chunk.dtype, item.chunk.sizes)
            for content in (around.before, octets(tensor), around.after):
                write_all(descriptor, memoryview(content), at)
                at += len(content)
            on_bytes(tensor.nbytes)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
