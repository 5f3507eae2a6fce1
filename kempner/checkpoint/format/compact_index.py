"""The compact index: a few hundred kilobytes instead of `.metadata` for thousands of ranks.

DCP's `.metadata` lists every part of every tensor, and would be gigabytes there. Where the parts
are follows from how each tensor is cut (`plan`), so the index says only that:

    {"format": 1, "world": 4096, "tensors": [["model.norm.weight", [512], "float32", [4096], [0]]]}

a tensor being its key, shape, dtype, device mesh, and the dimension that is cut along each
dimension of the mesh, or null.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from kempner.checkpoint.format.contents import Part, Saved
from kempner.checkpoint.format.shard_plan import (
    Container,
    TensorSpec,
    arrange,
    chunk_of,
    data_file,
    holders,
)
from kempner.run.process.exit_codes import DataError

INDEX: Final = "index.json"
"""The name of the file, in place of `.metadata`."""

COMPACT_ABOVE = 1_024
"""Ranks above which a checkpoint has the index instead of `.metadata`."""

_FORMAT = 1
_DTYPE = re.compile(r"[a-z][a-z0-9_]*")


class CompactIndex:
    """The `Contents` of a checkpoint with an index: parts are worked out when they are asked for.

    `container` says how many bytes a part takes; see `plan.place`.
    """

    def __init__(
        self,
        specs: Sequence[TensorSpec],
        world: int,
        container: Callable[[str, tuple[int, ...]], Container],
    ) -> None:
        self.specs, self.world, self._container = specs, world, container
        self._by_key = {spec.key: spec for spec in specs}
        self.tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in specs}
        self._files: dict[int, Mapping[str, tuple[int, int]]] = {}
        self._layouts: dict[tuple[object, ...], Mapping[str, tuple[int, int]]] = {}

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterator[Part]:
        """The stored parts that overlap a box; see `Contents`."""
        spec = self._by_key[key]
        for rank in holders(spec, offsets, sizes):
            chunk = chunk_of(spec, rank)
            if chunk is None:
                continue  # a box without elements touches what nobody holds
            start, length = self._file(rank)[key]
            yield Part(chunk.offsets, chunk.sizes, data_file(rank), start, length)

    def _file(self, rank: int) -> Mapping[str, tuple[int, int]]:
        """Where in the file of `rank` each container starts, and its length, in bytes, by key.

        Most ranks' files are laid out alike, and share one such table.
        """
        if rank not in self._files:
            chunks = [chunk_of(spec, rank) for spec in self.specs]
            shapes = tuple(chunk and chunk.sizes for chunk in chunks)
            if shapes not in self._layouts:
                placed = arrange((chunk for chunk in chunks if chunk), self._container)
                self._layouts[shapes] = {
                    item.chunk.key: (item.start, item.container.length) for item in placed
                }
            self._files[rank] = self._layouts[shapes]
        return self._files[rank]


def encode(specs: Sequence[TensorSpec], world: int) -> bytes:
    """The bytes of the index of a state that `world` ranks write; the same at every save."""
    tensors = [[s.key, s.shape, s.dtype, s.mesh, s.placements] for s in specs]
    fields = {"format": _FORMAT, "world": world, "tensors": tensors}
    return (json.dumps(fields, separators=(",", ":")) + "\n").encode()


def decode(content: bytes, where: Path) -> tuple[list[TensorSpec], int]:
    """Specs and world back from the bytes. Raises `DataError`, naming `where`, if they are not."""
    try:
        fields = json.loads(content)
        if fields["format"] != _FORMAT:
            raise ValueError(f"format {fields['format']}")
        return [_spec(*entry) for entry in fields["tensors"]], int(fields["world"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise DataError(
            f"{where} is damaged: it is not an index of a checkpoint ({error})"
        ) from error


def _spec(key: Any, shape: Any, dtype: Any, mesh: Any, placements: Any) -> TensorSpec:
    """One tensor, checked: the file may be anybody's."""
    dims = [dim for dim in placements if dim is not None]
    whole = [*shape, *mesh, *dims]
    sound = (
        isinstance(key, str)
        and _DTYPE.fullmatch(dtype)
        and all(type(number) is int and number >= 0 for number in whole)
        and all(mesh)
        and all(dim < len(shape) for dim in dims)
        and len(mesh) == len(placements)
    )
    if not sound:
        raise ValueError(f"{key!r} makes no sense")
    return TensorSpec(key, tuple(shape), dtype, tuple(mesh), tuple(placements))
