"""Loads a rank's tensors from a checkpoint of any world size, verifying what it reads.

What to read follows from the checkpoint's index and the rank's own shards, so ranks need not
communicate. Every block is verified before its data is used, and every element of every tensor must
be covered.
"""

from __future__ import annotations

import math
import platform
import struct
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

from kempner.checkpoint.format.compact_index import INDEX, decode
from kempner.checkpoint.format.contents import Contents, Part, overlap
from kempner.checkpoint.format.manifest import Manifest, rank_of
from kempner.checkpoint.io.verify import Cursor, MemoryCopy, VerifiedFile, read_whole, verify_files
from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.run.process.durable_io import await_entry
from kempner.run.process.exit_codes import DataError, NotSharedError
from kempner.run.process.retry import storage_waits

SLAB_BYTES = 8 << 20  # largest read, except for larger single rows
RUN_PIECES = 8  # fewest pieces per task of a thread
READERS = 4  # threads that read and verify; both release the interpreter's lock
NO_MEMORY: Mapping[str, MemoryCopy] = MappingProxyType({})

_HEADER = struct.Struct("<4s5H3I2H")  # a zip archive's local file header, APPNOTE 4.3.7
_HEADER_MAGIC = b"PK\x03\x04"
_RECORD = b"/data/0"
_PREFIX_BYTES = 1024


@dataclass(frozen=True)
class _Piece:
    """The intersection of a saved part and a local tensor."""

    stored: Part
    from_chunk: tuple[slice, ...]
    into_local: tuple[slice, ...]
    key: str

    @property
    def elements(self) -> int:
        return math.prod(s.stop - s.start for s in self.from_chunk)


@dataclass
class LoadedBytes:
    bytes: int = 0
    from_memory: int = 0


def fill(
    table: Mapping[str, Tensor],
    checkpoint: Path,
    manifest: Manifest,
    contents: Contents,
    memory: Mapping[str, MemoryCopy] = NO_MEMORY,
) -> LoadedBytes:
    """Read the local part of every tensor of `table` in place; files in `memory`, by name, are read
    from there.

    Raises `DataError` if a block is damaged, a file is missing, or an element is not covered, and
    as `StorageWaits.retry` if a file cannot be read now. Together, the ranks read every block of
    every file with tensors; `open_contents` checks the other files."""
    pieces = _plan({key: _local_box(tensor) for key, tensor in table.items()}, contents)
    names = sorted({piece.stored.file for piece in pieces})
    files: dict[str, VerifiedFile] = {}
    for name in names:
        if name not in manifest.files:
            raise DataError(f"{name} is not in the manifest")
        entry, known = manifest.files[name], memory.get(name)
        files[name] = VerifiedFile(checkpoint / name, entry, manifest.files, known)
    with ThreadPoolExecutor(READERS, "reader") as pool:
        parts = list(pool.map(lambda run: _read_run(run, table, files), _runs(pieces)))
    return LoadedBytes(sum(part.bytes for part in parts), sum(part.from_memory for part in parts))


class _Box(NamedTuple):
    """This rank's part of a tensor, in elements of `element_size` bytes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    element_size: int


def _plan(boxes: Mapping[str, _Box], contents: Contents) -> list[_Piece]:
    """The pieces to read, in file order. Raises `DataError` if an element is not covered."""
    pieces = [
        part
        for key, box in boxes.items()
        for piece in _pieces(key, box.offsets, box.sizes, contents)
        for part in _cut(piece, box.element_size)
    ]
    return sorted(pieces, key=lambda piece: (piece.stored.file, piece.stored.start))


def _pieces(
    key: str, offsets: tuple[int, ...], sizes: tuple[int, ...], contents: Contents
) -> Iterable[_Piece]:
    """The intersections of saved parts with a box of a tensor."""
    found = []
    for part in contents.parts(key, offsets, sizes):
        shared = overlap(offsets, sizes, part.offsets, part.sizes)
        if shared is not None:
            low, high = shared
            from_chunk, into_local = _slices(low, high, part.offsets), _slices(low, high, offsets)
            found.append(_Piece(part, from_chunk, into_local, key))
    if sum(piece.elements for piece in found) != math.prod(sizes):
        raise DataError(f"{key}: the checkpoint does not contain every element of it")
    return found


def _cut(piece: _Piece, element_size: int) -> Iterable[_Piece]:
    """Split a piece into groups of rows, so that a large tensor needs no second buffer of its
    size."""
    if not piece.from_chunk:
        return [piece]
    row_bytes = element_size * math.prod(piece.stored.sizes[1:])
    rows = max(1, SLAB_BYTES // max(1, row_bytes))
    source, target = piece.from_chunk[0], piece.into_local[0]
    if source.stop - source.start <= rows:
        return [piece]
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


def _local_box(tensor: Tensor) -> _Box:
    size = tensor.element_size()
    if not is_sharded(tensor):
        return _Box((0,) * tensor.ndim, tuple(tensor.shape), size)
    (chunk,) = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return _Box(tuple(chunk.offsets), tuple(chunk.sizes), size)


def _runs(pieces: Sequence[_Piece]) -> Iterable[Sequence[_Piece]]:
    """Groups of neighbouring pieces of one file, each for one thread."""
    for _, group in groupby(pieces, key=lambda piece: piece.stored.file):
        of_file = list(group)
        length = max(RUN_PIECES, -(-len(of_file) // READERS))
        yield from (of_file[at : at + length] for at in range(0, len(of_file), length))


def _read_run(
    run: Sequence[_Piece], table: Mapping[str, Tensor], files: Mapping[str, VerifiedFile]
) -> LoadedBytes:
    file, checked = files[run[0].stored.file], -1
    with Cursor(file) as cursor:
        for piece in run:
            container = piece.stored.start
            before = _data_offset(cursor.peek(container, _PREFIX_BYTES), piece.stored)
            if checked != container:
                cursor.read(container, container + before)  # verify the header that was peeked at
                checked = container
            _copy(piece, local_part(table[piece.key]), before, cursor)
        end = run[-1].stored.start + run[-1].stored.length
        if end == file.sums.bytes:
            cursor.read(end - 1, end)  # verify the last block, too, which may hold no data
        return LoadedBytes(cursor.bytes_read, cursor.bytes_from_memory)


def _copy(piece: _Piece, target: Tensor, before: int, cursor: Cursor) -> None:
    """Copy one piece into `target`; its data begin `before` bytes into the container."""
    stored, rows = piece.stored, piece.from_chunk
    # Rows are contiguous, so only the wanted ones are read; for a cut along another dimension
    # whole rows are read.
    first, end = (rows[0].start, rows[0].stop) if rows else (0, 1)
    width = target.element_size() * math.prod(piece.stored.sizes[1:])
    if before + width * (piece.stored.sizes[0] if rows else 1) > stored.length:
        raise DataError(f"{piece.key}: its container at byte {stored.start} is too small for it")
    start = stored.start + before + first * width
    content = cursor.read(start, start + (end - first) * width)
    sizes = (end - first, *piece.stored.sizes[1:]) if rows else ()
    values = torch.frombuffer(content, dtype=target.dtype).view(sizes)
    target[piece.into_local].copy_(values[(slice(None), *rows[1:])] if rows else values)


def _data_offset(prefix: bytes, stored: Part) -> int:
    """The offset of a tensor's data in its container, from the container's headers."""
    name = prefix.find(_RECORD)
    header = prefix.rfind(_HEADER_MAGIC, 0, name)
    if name < 0 or header < 0 or not prefix.startswith(_HEADER_MAGIC):
        raise DataError(f"{stored.file}: no tensor at byte {stored.start}")
    *_, name_length, extra_length = _HEADER.unpack_from(prefix, header)
    return header + _HEADER.size + int(name_length) + int(extra_length)


def open_contents(checkpoint: Path, manifest: Manifest, rank: int = 0, world: int = 1) -> Contents:
    """The contents of a checkpoint. Raises `DataError` unless they are as in the manifest.

    Files without tensors, such as `.metadata`, are verified here, each rank of a `world` its share,
    so that together the ranks read every block of every file.

    A rank may see the folder later than rank 0, which has chosen it, and waits for it. A rank that
    never sees it raises `NotSharedError`, since the checkpoint itself may be good. If the parent
    folder is not visible either, storage counts as unavailable, and is retried."""
    storage_waits().retry(partial(_await_folder, checkpoint), worked=True)
    contents = _read_index(checkpoint / INDEX, manifest)
    for damage in verify_files(checkpoint, manifest, _needless_files(manifest)[rank::world]):
        raise DataError(str(damage))
    return contents


def _await_folder(checkpoint: Path) -> None:
    """Raises `OSError` if storage is unavailable, and `NotSharedError` if only the folder is
    missing."""
    checkpoint.parent.stat()
    if not await_entry(checkpoint):
        checkpoint.parent.stat()
        raise not_seen(checkpoint)


def not_seen(checkpoint: Path) -> NotSharedError:
    """The error of a rank that does not see a checkpoint after waiting."""
    return NotSharedError(
        f"{checkpoint} is not visible on {platform.node()}, although rank 0 has chosen it: is it "
        "on a file system that all nodes share?"
    )


def _read_index(path: Path, manifest: Manifest) -> Contents:
    if INDEX not in manifest.files:
        raise DataError(f"{INDEX}: is not in the manifest")
    index = decode(read_whole(path, manifest.files[INDEX]), path)
    for key, saved in index.tensors.items():
        if not isinstance(getattr(torch, saved.dtype, None), torch.dtype):
            raise DataError(f"{path} is damaged: {key} is {saved.dtype}, which is not a dtype")
    return index


def _needless_files(manifest: Manifest) -> list[str]:
    """The files without tensors: of ranks that had nothing to write, and `.metadata`."""
    return [
        name
        for name, entry in manifest.files.items()
        if (entry.sums and entry.bytes == 0) or (rank_of(name, entry) is None and name != INDEX)
    ]
