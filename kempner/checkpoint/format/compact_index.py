"""The compact index: the place of each part of each tensor, in some 100 kB at any world size.

DCP's `.metadata` lists every part of every tensor: a million objects at 512 ranks, gigabytes at
thousands. The places of the parts follow from how each tensor is cut (`shard_plan`), so the index
lists only that:

    {"format": 1, "world": 4096, "tensors": [["model.norm.weight", [512], "float32", [4096], [0]]],
     "containers": [["float32", [1], 4, 1216]]}

A tensor is listed as key, shape, dtype and device mesh; for each mesh dimension the tensor
dimension that is cut along it, or null; and the order in which the mesh dimensions cut, if that is
not first to last. A container is listed as dtype and sizes of the part, its bytes of data, and its
bytes with the header. If any tensor is frozen, `"base": [0]` has the positions of the frozen ones.

If another library has cut the tensors, the index lists the parts instead:

    {"format": 1, "tensors": [["model.norm.weight", [512], "float32", 0]],
     "cuts": [[[0, [0], [256]], [1, [256], [256]]]], "containers": [["float32", [256], 1024, 2176]]}

A tensor is listed as key, shape, dtype and the number of its cut; a cut as its parts, each with
file number, offsets and sizes. Most tensors of a large model are cut alike, so there are few cuts.
The place of a part in its file follows from the file's other contents (`shard_plan.arrange`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from kempner.checkpoint.format.contents import (
    Extents,
    Part,
    Saved,
    are_numbers,
    list_extents,
    overlap,
    read_extents,
)
from kempner.checkpoint.format.shard_plan import (
    Chunk,
    Layouts,
    Placed,
    TensorSpec,
    arrange,
    by_file,
    data_file,
    holders,
    piece_sizes,
)
from kempner.run.process.exit_codes import DataError

_DTYPE = re.compile(r"[a-z][a-z0-9_]*")


class ListedPart(NamedTuple):
    """A part of a tensor: the number of its file, and offsets and sizes in elements."""

    file: int
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ListedTensor:
    key: str
    shape: tuple[int, ...]
    dtype: str
    cut: int


class ListedIndex:
    """The `Contents` of a checkpoint whose index lists the parts; `cuts` has the parts of each cut,
    in any order."""

    def __init__(
        self, listed: Sequence[ListedTensor], cuts: Sequence[Sequence[ListedPart]], extents: Extents
    ) -> None:
        self.tensors = {tensor.key: Saved(tensor.shape, tensor.dtype) for tensor in listed}
        self._listed, self._cuts, self._extents = listed, cuts, extents
        self._cut_of = {tensor.key: tensor.cut for tensor in listed}
        self._tables: dict[int, Mapping[tuple[str, tuple[int, ...]], Placed]] = {}
        self._overlaps: dict[tuple[object, ...], list[ListedPart]] = {}

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Saved],
        pieces: Mapping[str, Sequence[ListedPart]],
        extents: Extents,
    ) -> ListedIndex:
        """The index of `tensors` with these `pieces`, both by key."""
        numbers: dict[tuple[ListedPart, ...], int] = {}
        listed = [
            ListedTensor(
                key, saved.shape, saved.dtype, numbers.setdefault(tuple(pieces[key]), len(numbers))
            )
            for key, saved in tensors.items()
        ]
        return cls(listed, list(numbers), extents)

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
        for piece in self._overlapping(self._cut_of[key], tuple(offsets), tuple(sizes)):
            placed = self._table(piece.file)[key, piece.offsets]
            length = placed.container.length
            yield Part(piece.offsets, piece.sizes, data_file(piece.file), placed.start, length)

    def placed(self, file: int) -> list[Placed]:
        of_cut = [[piece for piece in cut if piece.file == file] for cut in self._cuts]
        chunks = (
            Chunk(tensor.key, piece.offsets, piece.sizes, tensor.dtype)
            for tensor in self._listed
            for piece in of_cut[tensor.cut]
        )
        return arrange(chunks, self._extents)

    def to_fields(self) -> dict[str, Any]:
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
        """Raises `ValueError`, `KeyError` or `TypeError` for fields of no such index."""
        cuts = [[_piece(*entry) for entry in cut] for cut in fields["cuts"]]
        dimensions = [{len(piece.offsets) for piece in cut} for cut in cuts]
        listed = [_tensor(dimensions, *entry) for entry in fields["tensors"]]
        return cls(listed, cuts, read_extents(fields["containers"]))

    def _overlapping(
        self, cut: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> list[ListedPart]:
        """The pieces that overlap a box; cached for all tensors that are cut alike."""
        box = (cut, offsets, sizes)
        if box not in self._overlaps:
            self._overlaps[box] = [
                piece
                for piece in self._cuts[cut]
                if overlap(offsets, sizes, piece.offsets, piece.sizes) is not None
            ]
        return self._overlaps[box]

    def _table(self, file: int) -> Mapping[tuple[str, tuple[int, ...]], Placed]:
        """The place of each part in a file, by key and offsets."""
        if file not in self._tables:
            placed = self.placed(file)
            self._tables[file] = {(item.chunk.key, item.chunk.offsets): item for item in placed}
        return self._tables[file]


def is_tensor(key: Any, shape: Any, dtype: Any) -> bool:
    """Whether these are valid entries of an index."""
    return isinstance(key, str) and bool(_DTYPE.fullmatch(dtype)) and are_numbers(shape)


def _piece(file: Any, offsets: Any, sizes: Any) -> ListedPart:
    if not are_numbers([file, *offsets, *sizes]) or len(offsets) != len(sizes):
        raise ValueError(f"a part at {offsets} makes no sense")
    return ListedPart(file, tuple(offsets), tuple(sizes))


def _tensor(
    dimensions: Sequence[set[int]], key: Any, shape: Any, dtype: Any, cut: Any
) -> ListedTensor:
    """Parse one tensor; `dimensions` are those of each cut's parts."""
    sound = is_tensor(key, shape, dtype) and are_numbers([cut]) and cut < len(dimensions)
    if not sound or not dimensions[cut] <= {len(shape)}:
        raise ValueError(f"{key!r} makes no sense")
    return ListedTensor(key, tuple(shape), dtype, cut)


INDEX: Final = "index.json"
"""The name of the index file; every checkpoint has one, and every load uses it."""

METADATA_UP_TO = 1_024
"""The largest world for which a checkpoint also has DCP's `.metadata`, for torch's own reader."""

_FORMAT = 1


class CompactIndex:
    """The `Contents` of a checkpoint that was cut by plan; parts are computed on demand."""

    def __init__(self, specs: Sequence[TensorSpec], world: int, extents: Extents) -> None:
        self.specs, self.world = specs, world
        self.tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in specs}
        parts = by_file(specs)
        self._layouts = [Layouts(part, extents) for part in parts]
        self._nth = {spec.key: nth for nth, part in enumerate(parts) for spec in part}
        self._files: dict[int, tuple[list[Chunk | None], Mapping[str, Placed]]] = {}
        self._tables: dict[int, Mapping[str, Placed]] = {}
        self._overlaps: dict[tuple[object, ...], list[int]] = {}

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
        nth = self._nth[key]
        kind = self._layouts[nth].kinds[key]
        for rank in self._holders(nth, kind, tuple(offsets), tuple(sizes)):
            number = nth * self.world + rank
            pieces, table = self._file(number)
            piece = pieces[kind]
            if piece is None:
                continue  # an empty box can touch a piece that no rank has
            placed = table[key]
            length = placed.container.length
            yield Part(piece.offsets, piece.sizes, data_file(number), placed.start, length)

    def _holders(
        self, nth: int, kind: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> list[int]:
        """As `holders`, cached for all tensors that are cut alike."""
        box = (nth, kind, offsets, sizes)
        if box not in self._overlaps:
            self._overlaps[box] = list(holders(self._layouts[nth].examples[kind], offsets, sizes))
        return self._overlaps[box]

    def _file(self, number: int) -> tuple[list[Chunk | None], Mapping[str, Placed]]:
        """The pieces in a file by kind, and the place of each tensor's container by key. Most
        ranks' files have the same layout, and share this table."""
        if number not in self._files:
            nth, rank = divmod(number, self.world)
            pieces = self._layouts[nth].pieces(rank)
            placed = self._layouts[nth].placed(pieces, rank)
            if id(placed) not in self._tables:
                self._tables[id(placed)] = {item.chunk.key: item for item in placed}
            self._files[number] = pieces, self._tables[id(placed)]
        return self._files[number]


def encode(specs: Sequence[TensorSpec], world: int, extents: Extents) -> bytes:
    """The index of a state that `world` ranks write; the same bytes at every save."""
    tensors = [
        [s.key, s.shape, s.dtype, s.mesh, s.placements, *([s.order] if s.order else [])]
        for s in specs
    ]
    pieces = ((spec.dtype, sizes) for spec in specs for sizes in piece_sizes(spec))
    containers = list_extents(pieces, extents)
    fields = {"format": _FORMAT, "world": world, "tensors": tensors, "containers": containers}
    if base := [number for number, spec in enumerate(specs) if spec.base]:
        fields["base"] = base
    return _encoded(fields)


def encode_listed(index: ListedIndex) -> bytes:
    return _encoded({"format": _FORMAT, **index.to_fields()})


def _encoded(fields: Mapping[str, Any]) -> bytes:
    return (json.dumps(fields, separators=(",", ":")) + "\n").encode()


def decode(content: bytes, where: Path) -> CompactIndex | ListedIndex:
    """Parse an index. Raises `DataError`, naming `where`, if it is invalid."""
    try:
        fields = json.loads(content)
        if fields["format"] != _FORMAT:
            raise ValueError(f"format {fields['format']}")
        if "cuts" in fields:
            return ListedIndex.from_fields(fields)
        specs = [_spec(*entry) for entry in fields["tensors"]]
        for number in fields.get("base", ()):
            specs[number] = replace(specs[number], base=True)
        return CompactIndex(specs, int(fields["world"]), read_extents(fields["containers"]))
    except (ValueError, LookupError, TypeError, RecursionError) as error:
        raise DataError(
            f"{where} is damaged: it is not an index of a checkpoint ({error})"
        ) from error


def _spec(
    key: Any, shape: Any, dtype: Any, mesh: Any, placements: Any, order: Any = ()
) -> TensorSpec:
    """Parse one tensor, with checks: the file is not trusted."""
    dims = [dim for dim in placements if dim is not None]
    sound = (
        is_tensor(key, shape, dtype)
        and are_numbers([*mesh, *dims])
        and all(mesh)
        and all(dim < len(shape) for dim in dims)
        and len(mesh) == len(placements)
        and (not order or sorted(order) == list(range(len(mesh))))
    )
    if not sound:
        raise ValueError(f"{key!r} makes no sense")
    return TensorSpec(key, tuple(shape), dtype, tuple(mesh), tuple(placements), tuple(order))
