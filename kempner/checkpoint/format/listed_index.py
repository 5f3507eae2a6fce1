"""The index of a checkpoint whose tensors somebody else has cut: it lists the parts.

    {"format": 1, "tensors": [["model.norm.weight", [512], "float32", 0]],
     "cuts": [[[0, [0], [256]], [1, [256], [256]]]], "containers": [["float32", [256], 1024, 2176]]}

A tensor is its key, shape, dtype and the number of its cut; a cut is the parts, each with the
number of its file, offsets and sizes. A large model has few cuts, as most of its tensors are cut
alike. Where in a file a part is follows from what else is there (`shard_plan.arrange`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kempner.checkpoint.format.contents import Part, Saved, overlap
from kempner.checkpoint.format.extents import Extents, are_numbers, list_extents, read_extents
from kempner.checkpoint.format.shard_plan import Chunk, Placed, arrange, data_file

_DTYPE = re.compile(r"[a-z][a-z0-9_]*")


class Piece(NamedTuple):
    """A part of a tensor: the number of its file, and offsets and sizes in elements."""

    file: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ListedTensor:
    """A tensor, and the number of its cut."""

    key: str
    shape: tuple[int, ...]
    dtype: str
    cut: int


class ListedIndex:
    """The `Contents` of such a checkpoint; `cuts` are the pieces of each, in any order."""

    def __init__(
        self,
        listed: Sequence[ListedTensor],
        cuts: Sequence[Sequence[Piece]],
        extents: Extents,
    ) -> None:
        self.tensors = {tensor.key: Saved(tensor.shape, tensor.dtype) for tensor in listed}
        self._listed, self._cuts, self._extents = listed, cuts, extents
        self._cut_of = {tensor.key: tensor.cut for tensor in listed}
        self._tables: dict[int, Mapping[tuple[str, tuple[int, ...]], Placed]] = {}
        self._overlaps: dict[tuple[object, ...], list[Piece]] = {}

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Saved],
        pieces: Mapping[str, Sequence[Piece]],
        extents: Extents,
    ) -> ListedIndex:
        """The index of `tensors` with these `pieces`, both by key."""
        numbers: dict[tuple[Piece, ...], int] = {}
        listed = [
            ListedTensor(
                key, saved.shape, saved.dtype, numbers.setdefault(tuple(pieces[key]), len(numbers))
            )
            for key, saved in tensors.items()
        ]
        return cls(listed, list(numbers), extents)

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
        """The stored parts that overlap a box; see `Contents`."""
        for piece in self._overlapping(self._cut_of[key], tuple(offsets), tuple(sizes)):
            placed = self._table(piece.file)[key, piece.offsets]
            length = placed.container.length
            yield Part(piece.offsets, piece.sizes, data_file(piece.file), placed.start, length)

    def placed(self, file: int) -> list[Placed]:
        """The contents of a file, by its number."""
        of_cut = [[piece for piece in cut if piece.file == file] for cut in self._cuts]
        chunks = (
            Chunk(tensor.key, piece.offsets, piece.sizes, tensor.dtype)
            for tensor in self._listed
            for piece in of_cut[tensor.cut]
        )
        return arrange(chunks, self._extents)

    def to_fields(self) -> dict[str, Any]:
        """What `from_fields` reads."""
        tensors = [[tensor.key, tensor.shape, tensor.dtype, tensor.cut] for tensor in self._listed]
        pieces = (
            (tensor.dtype, piece.sizes)
            for tensor in self._listed
            for piece in self._cuts[tensor.cut]
        )
        containers = list_extents(pieces, self._extents)
        return {"tensors": tensors, "cuts": self._cuts, "containers": containers}

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> ListedIndex:
        """Raises `ValueError`, `KeyError` or `TypeError` for what is none: it may be anybody's."""
        cuts = [[_piece(*entry) for entry in cut] for cut in fields["cuts"]]
        dimensions = [{len(piece.offsets) for piece in cut} for cut in cuts]
        listed = [_tensor(dimensions, *entry) for entry in fields["tensors"]]
        return cls(listed, cuts, read_extents(fields["containers"]))

    def _overlapping(
        self, cut: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> list[Piece]:
        """The pieces that have something of a box, looked for once for all tensors cut alike."""
        box = (cut, offsets, sizes)
        if box not in self._overlaps:
            self._overlaps[box] = [
                piece
                for piece in self._cuts[cut]
                if overlap(offsets, sizes, piece.offsets, piece.sizes) is not None
            ]
        return self._overlaps[box]

    def _table(self, file: int) -> Mapping[tuple[str, tuple[int, ...]], Placed]:
        """Where in a file each part is, by key and offsets."""
        if file not in self._tables:
            placed = self.placed(file)
            self._tables[file] = {(item.chunk.key, item.chunk.offsets): item for item in placed}
        return self._tables[file]


def is_tensor(key: Any, shape: Any, dtype: Any) -> bool:
    """Whether these are what an index says of a tensor."""
    return isinstance(key, str) and bool(_DTYPE.fullmatch(dtype)) and are_numbers(shape)


def _piece(file: Any, offsets: Any, sizes: Any) -> Piece:
    if not are_numbers([file, *offsets, *sizes]) or len(offsets) != len(sizes):
        raise ValueError(f"a part at {offsets} makes no sense")
    return Piece(file, tuple(offsets), tuple(sizes))


def _tensor(
    dimensions: Sequence[set[int]], key: Any, shape: Any, dtype: Any, cut: Any
) -> ListedTensor:
    """One tensor, checked; `dimensions` are those of each cut's parts."""
    sound = is_tensor(key, shape, dtype) and are_numbers([cut]) and cut < len(dimensions)
    if not sound or not dimensions[cut] <= {len(shape)}:
        raise ValueError(f"{key!r} makes no sense")
    return ListedTensor(key, tuple(shape), dtype, cut)
