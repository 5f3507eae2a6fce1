"""Fills a rank's tensors from a checkpoint of any world: only what it needs, checked as it comes.

What to read follows from the checkpoint's own metadata and the rank's own shards, so no rank asks
another. Every block that is read is checked against its checksum first, and every element of every
tensor must have come from somewhere.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.tensor import DTensor

from kempner.checkpoint.manifest import Manifest
from kempner.checkpoint.ranges import Cursor, VerifiedFile
from kempner.checkpoint.state import local_part
from kempner.checkpoint.verify import verify_files
from kempner.run.exit_codes import DataError

SLAB_BYTES = 8 << 20
"""Largest read, but for single rows that are larger."""

RUN_PIECES = 8
"""Fewest pieces that are worth a thread of their own."""

READERS = 4
"""Threads that read and check; both release the interpreter."""

_HEADER = struct.Struct("<4s5H3I2H")  # a zip archive's local file header, APPNOTE 4.3.7
_HEADER_MAGIC = b"PK\x03\x04"
_RECORD = b"/data/0"
_PREFIX_BYTES = 1024


@dataclass(frozen=True)
class _Piece:
    """What a saved chunk and a local tensor have in common."""

    stored: _StorageInfo
    chunk_sizes: tuple[int, ...]
    from_chunk: tuple[slice, ...]
    into_local: tuple[slice, ...]
    key: str

    @property
    def elements(self) -> int:
        return math.prod(s.stop - s.start for s in self.from_chunk)


def fill(
    table: Mapping[str, Tensor], checkpoint: Path, manifest: Manifest, metadata: Metadata
) -> int:
    """Read the local part of every tensor of `table`, in place; returns the bytes read.

    Raises `DataError` if a block is damaged, a file is missing, or an element is not covered. What
    the ranks of a world read between them is every block of every file.
    """
    pieces = [
        part
        for key, tensor in table.items()
        for piece in _pieces(key, tensor, metadata)
        for part in _cut(piece, tensor.element_size())
    ]
    for damage in verify_files(checkpoint, manifest, _idle_files(manifest, metadata)):
        raise DataError(str(damage))
    names = sorted({piece.stored.relative_path for piece in pieces})
    files: dict[str, VerifiedFile] = {}
    try:
        for name in names:
            if name not in manifest.files:
                raise DataError(f"{name} is not in the manifest")
            files[name] = VerifiedFile(checkpoint / name, manifest.files[name], manifest.files)
        pieces.sort(key=lambda piece: (piece.stored.relative_path, piece.stored.offset))
        with ThreadPoolExecutor(READERS, "reader") as pool:
            runs = _runs(pieces)
            return sum(pool.map(lambda run: _read_run(run, table, files), runs))
    finally:
        for file in files.values():
            file.close()


def _idle_files(manifest: Manifest, metadata: Metadata) -> Iterable[str]:
    """Data files in which there is no tensor: their ranks had nothing to write."""
    used = {stored.relative_path for stored in metadata.storage_data.values()}
    return [name for name, entry in manifest.files.items() if entry.sums and name not in used]


def _pieces(key: str, tensor: Tensor, metadata: Metadata) -> Iterable[_Piece]:
    """The saved chunks that overlap this rank's part of a tensor."""
    saved = metadata.state_dict_metadata[key]
    assert isinstance(saved, TensorStorageMetadata)  # check_shapes has seen to it
    offsets, sizes = _local_place(tensor)
    found = []
    for number, chunk in enumerate(saved.chunks):
        low = [max(a, b) for a, b in zip(offsets, chunk.offsets, strict=True)]
        ends = zip(offsets, sizes, chunk.offsets, chunk.sizes, strict=True)
        high = [min(a + n, b + m) for a, n, b, m in ends]
        if any(first >= end for first, end in zip(low, high, strict=True)):
            continue
        stored = metadata.storage_data.get(MetadataIndex(key, chunk.offsets, number))
        if stored is None:
            raise DataError(f"{key}: the part at {tuple(chunk.offsets)} is stored nowhere")
        found.append(
            _Piece(
                stored,
                tuple(chunk.sizes),
                _slices(low, high, chunk.offsets),
                _slices(low, high, offsets),
                key,
            )
        )
    if sum(piece.elements for piece in found) != math.prod(sizes):
        raise DataError(f"{key}: the checkpoint does not hold every element of it")
    return found


def _cut(piece: _Piece, element_size: int) -> Iterable[_Piece]:
    """The piece in groups of rows, so that a large tensor needs no second one to be read into."""
    if not piece.from_chunk:
        return [piece]
    row_bytes = element_size * math.prod(piece.chunk_sizes[1:])
    rows = max(1, SLAB_BYTES // max(1, row_bytes))
    source, target = piece.from_chunk[0], piece.into_local[0]
    starts = range(0, source.stop - source.start, rows)
    return [
        replace(
            piece,
            from_chunk=(_shifted(source, at, rows), *piece.from_chunk[1:]),
            into_local=(_shifted(target, at, rows), *piece.into_local[1:]),
        )
        for at in starts
    ]


def _shifted(whole: slice, at: int, length: int) -> slice:
    return slice(whole.start + at, min(whole.start + at + length, whole.stop))


def _slices(low: Iterable[int], high: Iterable[int], origin: Iterable[int]) -> tuple[slice, ...]:
    return tuple(slice(a - o, b - o) for a, b, o in zip(low, high, origin, strict=True))


def _local_place(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Offsets and sizes of what this rank holds of a tensor."""
    if not isinstance(tensor, DTensor):
        return (0,) * tensor.ndim, tuple(tensor.shape)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets), tuple(chunk.sizes)


def _runs(pieces: Sequence[_Piece]) -> Iterable[Sequence[_Piece]]:
    """Neighbours for one thread to read one after the other; each run is from one file."""
    for _, group in groupby(pieces, key=lambda piece: piece.stored.relative_path):
        of_file = list(group)
        length = max(RUN_PIECES, -(-len(of_file) // READERS))
        yield from (of_file[at : at + length] for at in range(0, len(of_file), length))


def _read_run(
    run: Sequence[_Piece], table: Mapping[str, Tensor], files: Mapping[str, VerifiedFile]
) -> int:
    """Read pieces of one file; returns the bytes read."""
    file = files[run[0].stored.relative_path]
    cursor, checked = Cursor(file), -1
    for piece in run:
        container = piece.stored.offset
        before = _data_offset(file.peek(container, _PREFIX_BYTES), piece.stored)
        if checked != container:
            cursor.read(container, container + before)  # what was peeked at, now checked
            checked = container
        _copy(piece, local_part(table[piece.key]), before, cursor)
    end = run[-1].stored.offset + run[-1].stored.length
    if end == file.sums.bytes:
        cursor.read(end - 1, end)  # the file's last block may hold no data
    return cursor.bytes_read


def _copy(piece: _Piece, target: Tensor, before: int, cursor: Cursor) -> None:
    """Put one piece where it belongs; its data begin `before` bytes into the container."""
    stored, rows = piece.stored, piece.from_chunk
    # Rows are contiguous, so only those that are wanted are read; a cut along another dimension
    # reads the rows whole.
    first, end = (rows[0].start, rows[0].stop) if rows else (0, 1)
    width = target.element_size() * math.prod(piece.chunk_sizes[1:])
    if before + width * (piece.chunk_sizes[0] if rows else 1) > stored.length:
        raise DataError(f"{piece.key}: its container at byte {stored.offset} is too small for it")
    start = stored.offset + before + first * width
    content = cursor.read(start, start + (end - first) * width)
    sizes = (end - first, *piece.chunk_sizes[1:]) if rows else ()
    values = torch.frombuffer(content, dtype=target.dtype).view(sizes)
    target[piece.into_local].copy_(values[(slice(None), *rows[1:])] if rows else values)


def _data_offset(prefix: bytes, stored: _StorageInfo) -> int:
    """Where in its container a tensor's data begin, by the container's own headers."""
    name = prefix.find(_RECORD)
    header = prefix.rfind(_HEADER_MAGIC, 0, name)
    if name < 0 or header < 0:
        raise DataError(f"{stored.relative_path}: no tensor at byte {stored.offset}")
    *_, name_length, extra_length = _HEADER.unpack_from(prefix, header)
    return header + _HEADER.size + int(name_length) + int(extra_length)
