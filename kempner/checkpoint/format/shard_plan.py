"""Plans which rank writes what, and where in its file: a pure function of the sharding.

No rank needs to ask another. What several ranks hold is written by one of them. Within a file the
small come first, so that a reader of a counter need not read a block of weights.

What is frozen is the base: it is apart, in a second file of each rank, whose number is that of the
rank after those of all ranks. Where nothing is frozen there are no such files.
"""

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
    """One tensor of the state, as every rank knows it.

    `placements` has one entry per dimension of the device `mesh`: the tensor dimension that is cut
    along it, or None where every rank along it holds the same. `order` lists the dimensions of the
    mesh as they cut, where that is not from the first to the last: FSDP cuts what tensor
    parallelism has cut before, although the tensor groups are the last dimension. `base` says that
    it is frozen.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...]
    placements: tuple[int | None, ...]
    order: tuple[int, ...] = ()
    base: bool = False

    @property
    def cuts(self) -> Iterator[tuple[int, int, int | None]]:
        """The dimensions of the mesh as they cut: which one, its size, its placement."""
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
    """A chunk in its rank's file, with its container starting at byte `start`."""

    chunk: Chunk
    start: int
    container: Extent


class ListedChunk(NamedTuple):
    """A chunk as a table of contents lists it: `length` bytes of its file from `start` on."""

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
    """The part that `rank` writes; None if it holds none, or another rank writes it."""
    here = coordinate(rank, spec.mesh)
    if None in spec.placements:
        writer = _writer(spec)
        for at, parts, dim in zip(here, spec.mesh, spec.placements, strict=True):
            if dim is None and at != writer % parts:
                return None
    cut = _cut(spec.shape, spec.mesh, spec.placements, spec.order, here)
    return Chunk(spec.key, *cut, spec.dtype) if cut is not None else None


def piece_sizes(spec: TensorSpec) -> set[tuple[int, ...]]:
    """The sizes of all parts of a tensor, found without asking every rank."""
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
    """How long the pieces are that `torch.chunk` makes."""
    piece = -(-whole // parts)
    return {piece, whole % piece or piece} if piece else {0}


def holders(spec: TensorSpec, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[int]:
    """The ranks that write what overlaps a box of a tensor, found without asking all of them."""
    writer = _writer(spec)
    # The next rank along a dimension is this much further on.
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
    """Which of its holders writes what is held several times, modulo their number. What is large is
    spread over them. What is small is all with the first: a reader that needs every counter of an
    optimizer would otherwise open hundreds of files for a few bytes each."""
    return crc32(spec.key.encode()) if math.prod(spec.shape) > SMALL else 0


def _writers(spec: TensorSpec) -> tuple[int, ...]:
    """Where the writer sits along each dimension of the mesh whose ranks hold the same."""
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
    """Offsets and sizes of the part at a place of the mesh; None where nothing is left for it. Cut
    as `torch.chunk` does: every piece as large as the first, until nothing is left. A parameter and
    its optimizer state are cut alike, and get the same objects."""
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
    """The contents of the file of `rank`, in order of size and name."""
    chunks = (chunk for spec in specs if (chunk := chunk_of(spec, rank)) is not None)
    return arrange(chunks, container)


class Layouts:
    """What lies in any rank's file. What is cut into pieces of the same sizes is placed once. A
    large model has thousands of tensors, but few kinds of them, which are cut alike; and most
    ranks' files differ in the offsets alone."""

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
        """What `rank` writes of each kind's example; None where that is nothing."""
        return [chunk_of(spec, rank) for spec in self.examples]

    def placed(self, pieces: Sequence[Chunk | None], rank: int) -> list[Placed]:
        """The file of `rank`, which has these `pieces`; offsets may be those of another rank. The
        same object for all files that are laid out alike."""
        sizes = tuple(piece.sizes if piece is not None else None for piece in pieces)
        if sizes not in self._placed:
            self._placed[sizes] = place(self._specs, rank, self._container)
        return self._placed[sizes]


def by_file(specs: Sequence[TensorSpec]) -> list[list[TensorSpec]]:
    """What goes into the first file of a rank and, if anything is frozen, into its second."""
    parts = [[spec for spec in specs if spec.base is base] for base in (False, True)]
    return parts if parts[1] else parts[:1]


def list_all(
    specs: Sequence[TensorSpec], world: int, container: Extents
) -> Iterator[list[ListedChunk]]:
    """The contents of every file, by its number."""
    for part in by_file(specs):
        layouts = Layouts(part, container)
        kinds = layouts.kinds
        for rank in range(world):
            pieces = layouts.pieces(rank)
            placed = layouts.placed(pieces, rank)
            yield [
                ListedChunk(key, piece.offsets, piece.sizes, start, around.length)
                for key, start, around in ((p.chunk.key, p.start, p.container) for p in placed)
                if (piece := pieces[kinds[key]]) is not None
            ]


def listed(placed: Iterable[Placed]) -> list[ListedChunk]:
    return [
        ListedChunk(p.chunk.key, p.chunk.offsets, p.chunk.sizes, p.start, p.container.length)
        for p in placed
    ]


def arrange(chunks: Iterable[Chunk], container: Extents) -> list[Placed]:
    """Chunks in one file, in order of size and name."""
    sized = [(container(chunk.dtype, chunk.sizes), chunk) for chunk in chunks]
    placed, start = [], 0
    for around, chunk in sorted(sized, key=lambda item: (item[0].data, item[1].key)):
        placed.append(Placed(chunk, start, around))
        start += -(-around.length // ALIGNMENT) * ALIGNMENT
    return placed


def file_length(placed: Sequence[Placed]) -> int:
    return placed[-1].start + placed[-1].container.length if placed else 0


def data_file(number: int) -> str:
    """The name of the data file of a rank, as DCP's own writer would choose it; see `base_file`."""
    return f"__{number}_0.distcp"


def base_file(rank: int, world: int) -> str:
    return data_file(world + rank)


def digest(specs: Iterable[TensorSpec]) -> int:
    """63 bits that differ between plans; ranks compare theirs at every save."""
    return number_of("\n".join(map(repr, specs)))


def number_of(text: str) -> int:
    """63 bits that differ between texts."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
