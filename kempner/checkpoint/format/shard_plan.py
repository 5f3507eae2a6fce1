"""Plans which rank writes which part of the state, and where in its file: a pure function of the
sharding.

So ranks need not communicate. A part that several ranks hold is written by one of them. Within a
file small tensors come first, so that a reader of a counter need not read a block of weights.

Frozen tensors are the base: they are in a second file of each rank, numbered `world + rank`. If
nothing is frozen there are no such files."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple
from zlib import crc32

from kempner.checkpoint.format.contents import Extent, Extents

ALIGNMENT = 64  # containers start at multiples of this, and so does the data in them


SMALL = 256  # elements up to which a tensor takes no more room than its container


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the state, with its sharding.

    `placements` has one entry per dimension of the device `mesh`: the tensor dimension that is
    sharded along it, or None if it is replicated. `order` lists the mesh dimensions in the order in
    which they cut, if that is not first to last: FSDP cuts what tensor parallelism has cut before,
    although the tensor groups are the last mesh dimension. `base`: the tensor is frozen."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...]
    placements: tuple[int | None, ...]
    order: tuple[int, ...] = ()
    base: bool = False

    @property
    def cuts(self) -> Iterator[tuple[int, int, int | None]]:
        """For each mesh dimension, in the order in which they cut: its index, size and
        placement."""
        for level in self.order or range(len(self.mesh)):
            yield level, self.mesh[level], self.placements[level]


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor; `offsets` and `sizes` in elements, one per dimension."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Placed:
    """A chunk and its container, which starts at byte `start` of the rank's file."""

    chunk: Chunk
    start: int
    container: Extent


class ListedChunk(NamedTuple):
    """A chunk in a file's list of contents: `length` bytes from `start`."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    length: int


@lru_cache(1 << 16)
def coordinate(rank: int, mesh: tuple[int, ...]) -> tuple[int, ...]:
    place = []
    for size in reversed(mesh):
        rank, at = divmod(rank, size)
        place.append(at)
    return tuple(reversed(place))


def chunk_of(spec: TensorSpec, rank: int) -> Chunk | None:
    """The part of a tensor that `rank` writes; None if it holds none, or another rank writes it."""
    here = coordinate(rank, spec.mesh)
    if None in spec.placements:
        writer = _writer(spec)
        for at, parts, dim in zip(here, spec.mesh, spec.placements, strict=True):
            if dim is None and at != writer % parts:
                return None
    cut = _cut(spec.shape, spec.mesh, spec.placements, spec.order, here)
    return Chunk(spec.key, *cut, spec.dtype) if cut is not None else None


def piece_sizes(spec: TensorSpec) -> set[tuple[int, ...]]:
    """The sizes of all parts of a tensor, without enumerating ranks."""
    found = {spec.shape}
    for _, parts, dim in spec.cuts:
        if dim is not None:
            found = {
                _replaced(sizes, dim, left)
                for sizes in found
                for left in _lengths(sizes[dim], parts)
            }
    return found


def _lengths(whole: int, parts: int) -> set[int]:
    """The lengths of the pieces that `torch.chunk` makes."""
    piece = -(-whole // parts)
    return {piece, whole % piece or piece} if piece else {0}


def holders(spec: TensorSpec, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """The ranks that write parts of a tensor that overlap a box, without enumerating all ranks."""
    writer = _writer(spec)
    # The difference between neighbouring ranks along each mesh dimension.
    strides = [math.prod(spec.mesh[level + 1 :]) for level in range(len(spec.mesh))]
    cuts = [(strides[level], parts, dim) for level, parts, dim in spec.cuts]

    def walk(rank: int, start: tuple[int, ...], left: tuple[int, ...], done: int) -> Iterator[int]:
        if done == len(cuts):
            yield rank
            return
        stride, parts, dim = cuts[done]
        if dim is None:
            yield from walk(rank + writer % parts * stride, start, left, done + 1)
            return
        piece = max(1, -(-left[dim] // parts))
        first = max(0, (offsets[dim] - start[dim]) // piece)
        end = min(left[dim], offsets[dim] + sizes[dim] - start[dim])
        for at in range(first, -(-end // piece)):
            inner = _replaced(start, dim, start[dim] + at * piece)
            rest = _replaced(left, dim, min(piece, left[dim] - at * piece))
            yield from walk(rank + at * stride, inner, rest, done + 1)

    yield from walk(0, (0,) * len(spec.shape), spec.shape, 0)


def _writer(spec: TensorSpec) -> int:
    """The number, modulo the number of holders, of the rank that writes a replicated tensor. Large
    tensors are spread over the holders. Small ones are all written by the first: else a reader of
    all counters of an optimizer would open hundreds of files for a few bytes each."""
    return crc32(spec.key.encode()) if math.prod(spec.shape) > SMALL else 0


def _writers(spec: TensorSpec) -> tuple[int, ...]:
    """The writer's coordinate along each mesh dimension on which the tensor is replicated."""
    writer = _writer(spec)
    sides = zip(spec.mesh, spec.placements, strict=True)
    return tuple(writer % parts for parts, dim in sides if dim is None)


def _replaced(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])


@lru_cache(1 << 12)
def _cut(
    shape: tuple[int, ...],
    mesh: tuple[int, ...],
    placements: tuple[int | None, ...],
    order: tuple[int, ...],
    here: tuple[int, ...],
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Offsets and sizes of the part at the mesh coordinate `here`; None if it is empty. Cut as by
    `torch.chunk`: all pieces are as large as the first, until nothing is left. Cached, since a
    parameter and its optimizer state are cut alike."""
    offsets, sizes = [0] * len(shape), list(shape)
    for level in order or range(len(mesh)):
        at, dim = here[level], placements[level]
        if dim is None:
            continue
        piece = -(-sizes[dim] // mesh[level])
        start = min(at * piece, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(piece, sizes[dim] - start)
        if sizes[dim] == 0 and at > 0:
            return None
    return tuple(offsets), tuple(sizes)


def place(specs: Iterable[TensorSpec], rank: int, container: Extents) -> list[Placed]:
    """The contents of the file of `rank`, sorted by size and name."""
    chunks = (chunk for spec in specs if (chunk := chunk_of(spec, rank)) is not None)
    return arrange(chunks, container)


class Layouts:
    """The contents of any rank's file, computed once for each distinct layout. A large model has
    thousands of tensors but few kinds of them (which are cut alike), and most ranks' files differ
    only in the offsets."""

    def __init__(self, specs: Sequence[TensorSpec], container: Extents) -> None:
        self._specs, self._container = specs, container
        numbers: dict[tuple[object, ...], int] = {}
        self.kinds = {
            spec.key: numbers.setdefault(
                (spec.shape, spec.mesh, spec.placements, spec.order, _writers(spec)), len(numbers)
            )
            for spec in specs
        }  # the number of each tensor's kind, by key
        examples = {self.kinds[spec.key]: spec for spec in specs}
        self.examples = [examples[kind] for kind in range(len(numbers))]
        """One tensor of each kind, by number."""
        self._placed: dict[tuple[tuple[int, ...] | None, ...], list[Placed]] = {}

    def pieces(self, rank: int) -> list[Chunk | None]:
        """The part of each kind's example that `rank` writes; None if there is none."""
        return [chunk_of(spec, rank) for spec in self.examples]

    def placed(self, pieces: Sequence[Chunk | None], rank: int) -> list[Placed]:
        """The layout of the file of `rank` with these `pieces`; its offsets may be another rank's.
        The same object for all files with the same layout."""
        sizes = tuple(piece.sizes if piece is not None else None for piece in pieces)
        if sizes not in self._placed:
            self._placed[sizes] = place(self._specs, rank, self._container)
        return self._placed[sizes]


def by_file(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """The tensors of a rank's first file and, if any are frozen, of its second."""
    parts = [[spec for spec in specs if spec.base is base] for base in (False, True)]
    return parts if parts[1] else parts[:1]


def list_all(
    specs: Sequence[TensorSpec], world: int, container: Extents
) -> Iterator[list[ListedChunk]]:
    """The contents of every file, in the order of their numbers."""
    for part in by_file(specs):
        layouts = Layouts(part, container)
        kinds = layouts.kinds
        for rank in range(world):
            pieces = layouts.pieces(rank)
            placed = layouts.placed(pieces, rank)
            yield [
                ListedChunk(key, piece.offsets, piece.sizes, start, extent.length)
                for key, start, extent in ((p.chunk.key, p.start, p.container) for p in placed)
                if (piece := pieces[kinds[key]]) is not None
            ]


def listed(placed: Iterable[Placed]) -> list[ListedChunk]:
    return [
        ListedChunk(p.chunk.key, p.chunk.offsets, p.chunk.sizes, p.start, p.container.length)
        for p in placed
    ]


def arrange(chunks: Iterable[Chunk], container: Extents) -> list[Placed]:
    """Chunks in one file, sorted by size and name."""
    sized = [(container(chunk.dtype, chunk.sizes), chunk) for chunk in chunks]
    placed, start = [], 0
    for extent, chunk in sorted(sized, key=lambda item: (item[0].data, item[1].key)):
        placed.append(Placed(chunk, start, extent))
        start += -(-extent.length // ALIGNMENT) * ALIGNMENT
    return placed


def file_length(placed: Sequence[Placed]) -> int:
    return placed[-1].start + placed[-1].container.length if placed else 0


def data_file(number: int) -> str:
    """The name of a rank's data file, as DCP's own writer names it; for frozen tensors see
    `base_file`."""
    return f"__{number}_0.distcp"


def base_file(rank: int, world: int) -> str:
    return data_file(world + rank)


def digest(specs: Iterable[TensorSpec]) -> int:
    """A 63-bit digest of a plan; ranks compare theirs at every save."""
    return number_of("\n".join(map(repr, specs)))


def number_of(text: str) -> int:
    """A 63-bit digest of a text."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
