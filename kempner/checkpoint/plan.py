"""Which rank writes what, and where in its file: a pure function of the sharding.

No rank needs to ask another. What several ranks hold is written by one of them. Within a file the
small come first, so that a reader of a counter need not read a block of weights.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from zlib import crc32

ALIGNMENT = 64
"""Containers start at multiples of this, and so does the data in them."""


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of the state, as every rank knows it.

    `placements` has one entry per dimension of the device `mesh`: the tensor dimension that is cut
    along it, or None where every rank along it holds the same.
    """

    key: str
    shape: tuple[int, ...]
    dtype: str
    mesh: tuple[int, ...]
    placements: tuple[int | None, ...]


@dataclass(frozen=True)
class Chunk:
    """A rectangular part of a tensor; `offsets` and `sizes` in elements, one per dimension."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Container:
    """The bytes `before` and `after` the `data` bytes of a tensor in DCP's file format.

    They depend on dtype and shape alone.
    """

    before: bytes
    data: int
    after: bytes

    @property
    def length(self) -> int:
        """Bytes of the whole container."""
        return len(self.before) + self.data + len(self.after)


@dataclass(frozen=True)
class Placed:
    """A chunk in its rank's file, with its container starting at byte `start`."""

    chunk: Chunk
    start: int
    container: Container


def coordinate(rank: int, mesh: Sequence[int]) -> tuple[int, ...]:
    """Where `rank` sits in a row-major mesh."""
    place = []
    for size in reversed(mesh):
        rank, at = divmod(rank, size)
        place.append(at)
    return tuple(reversed(place))


def chunk_of(spec: TensorSpec, rank: int) -> Chunk | None:
    """The part that `rank` writes; None if it holds none, or another rank writes it.

    Cut as `torch.chunk` does: every piece as large as the first, until nothing is left.
    """
    offsets, sizes = [0] * len(spec.shape), list(spec.shape)
    writer = crc32(spec.key.encode())  # spreads what is held several times over its holders
    for at, parts, dim in zip(coordinate(rank, spec.mesh), spec.mesh, spec.placements, strict=True):
        if dim is None:
            if at != writer % parts:
                return None
            continue
        piece = -(-sizes[dim] // parts)
        start = min(at * piece, sizes[dim])
        offsets[dim] += start
        sizes[dim] = min(piece, sizes[dim] - start)
        if sizes[dim] == 0 and at > 0:
            return None
    return Chunk(spec.key, tuple(offsets), tuple(sizes), spec.dtype)


def place(
    specs: Iterable[TensorSpec], rank: int, container: Callable[[str, tuple[int, ...]], Container]
) -> list[Placed]:
    """The contents of the file of `rank`, in order of size and name."""
    chunks = [chunk for spec in specs if (chunk := chunk_of(spec, rank)) is not None]
    sized = [(container(chunk.dtype, chunk.sizes), chunk) for chunk in chunks]
    placed, start = [], 0
    for around, chunk in sorted(sized, key=lambda item: (item[0].data, item[1].key)):
        placed.append(Placed(chunk, start, around))
        start += -(-around.length // ALIGNMENT) * ALIGNMENT
    return placed


def file_length(placed: Sequence[Placed]) -> int:
    """Bytes of the file with these contents."""
    return placed[-1].start + placed[-1].container.length if placed else 0


def digest(specs: Iterable[TensorSpec]) -> int:
    """63 bits that differ between plans; ranks compare theirs at every save."""
    text = "\n".join(map(repr, specs)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
