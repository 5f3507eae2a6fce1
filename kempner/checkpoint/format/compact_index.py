"""The compact index: what is where in a checkpoint, in a few hundred kilobytes at any world size.

DCP's `.metadata` lists every part of every tensor: a million objects at 512 ranks, gigabytes at
thousands. Where the parts are follows from how each tensor is cut (`shard_plan`), so the index says
only that:

    {"format": 1, "world": 4096, "tensors": [["model.norm.weight", [512], "float32", [4096], [0]]],
     "containers": [["float32", [1], 4, 1216]]}

a tensor being its key, shape, dtype, device mesh, the dimension that is cut along each dimension
of the mesh, or null, and the dimensions of the mesh as they cut, if not from the first to the last;
and a container the dtype and sizes of a part, the bytes of its data and all of its bytes. If any
tensor is frozen, `"base": [0]` has the numbers of those that are. What was cut by somebody else is
listed; see `listed_index`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from kempner.checkpoint.format.contents import Part, Saved
from kempner.checkpoint.format.extents import Extents, are_numbers, list_extents, read_extents
from kempner.checkpoint.format.listed_index import ListedIndex, is_tensor
from kempner.checkpoint.format.shard_plan import (
    Chunk,
    Layouts,
    Placed,
    TensorSpec,
    by_file,
    data_file,
    holders,
    piece_sizes,
)
from kempner.run.process.exit_codes import DataError

INDEX: Final = "index.json"
"""The name of the file; every checkpoint has it, and every load goes by it."""

METADATA_UP_TO = 1_024
"""Ranks up to which a checkpoint has DCP's `.metadata` as well, for the stock reader."""

_FORMAT = 1


class CompactIndex:
    """The `Contents` of what was cut by plan: parts are worked out when they are asked for."""

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
        """The stored parts that overlap a box; see `Contents`."""
        nth = self._nth[key]
        kind = self._layouts[nth].kinds[key]
        for rank in self._holders(nth, kind, tuple(offsets), tuple(sizes)):
            number = nth * self.world + rank
            pieces, table = self._file(number)
            piece = pieces[kind]
            if piece is None:
                continue  # a box without elements touches what nobody holds
            placed = table[key]
            length = placed.container.length
            yield Part(piece.offsets, piece.sizes, data_file(number), placed.start, length)

    def _holders(
        self, nth: int, kind: int, offsets: tuple[int, ...], sizes: tuple[int, ...]
    ) -> list[int]:
        """As `holders`, once for all tensors that are cut alike."""
        box = (nth, kind, offsets, sizes)
        if box not in self._overlaps:
            self._overlaps[box] = list(holders(self._layouts[nth].examples[kind], offsets, sizes))
        return self._overlaps[box]

    def _file(self, number: int) -> tuple[list[Chunk | None], Mapping[str, Placed]]:
        """The pieces in a file by kind, and where in it each tensor's container is, by key.

        Most ranks' files are laid out alike, and share one such table.
        """
        if number not in self._files:
            nth, rank = divmod(number, self.world)
            pieces = self._layouts[nth].pieces(rank)
            placed = self._layouts[nth].placed(pieces, rank)
            if id(placed) not in self._tables:
                self._tables[id(placed)] = {item.chunk.key: item for item in placed}
            self._files[number] = pieces, self._tables[id(placed)]
        return self._files[number]


def encode(specs: Sequence[TensorSpec], world: int, extents: Extents) -> bytes:
    """The bytes of the index of a state that `world` ranks write; the same at every save."""
    tensors = [
        [s.key, s.shape, s.dtype, s.mesh, s.placements, *([s.order] if s.order else [])]
        for s in specs
    ]
    pieces = ((spec.dtype, sizes) for spec in specs for sizes in piece_sizes(spec))
    containers = list_extents(pieces, extents)
    fields = {"format": _FORMAT, "world": world, "tensors": tensors, "containers": containers}
    if base := [number for number, spec in enumerate(specs) if spec.base]:
        fields["base"] = base
    return (json.dumps(fields, separators=(",", ":")) + "\n").encode()


def encode_listed(index: ListedIndex) -> bytes:
    """The bytes of an index that lists its parts."""
    fields = {"format": _FORMAT, **index.to_fields()}
    return (json.dumps(fields, separators=(",", ":")) + "\n").encode()


def decode(content: bytes, where: Path) -> CompactIndex | ListedIndex:
    """The index back from its bytes. Raises `DataError`, naming `where`, if they are not one."""
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
    """One tensor, checked: the file may be anybody's."""
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
