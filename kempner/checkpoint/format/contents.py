"""What a checkpoint contains and where: a common interface of DCP's `.metadata` and the compact
index.

The bytes of a tensor's container depend on dtype and sizes, but also on the version of torch that
wrote it, which may differ from the one that loads. So the index lists them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kempner.run.process.exit_codes import DataError


@dataclass(frozen=True)
class Saved:
    """A tensor as it was saved; `dtype` is torch's name for it, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor, and its container. `offsets` and `sizes` are in elements, one
    per dimension; `start` and `length` in bytes of `file`."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Contents(Protocol):
    @property
    def tensors(self) -> Mapping[str, Saved]: ...

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Part]:
        """The stored parts of a tensor that overlap the box at `offsets` with `sizes` elements.
        Raises `DataError` if a part is missing."""
        ...


@dataclass(frozen=True)
class RenamedContents:
    """The same tensors under other keys; `before` maps each new key to the saved one."""

    contents: Contents
    before: Mapping[str, str]

    @property
    def tensors(self) -> Mapping[str, Saved]:
        saved = self.contents.tensors
        return {key: saved[old] for key, old in self.before.items()}

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Part]:
        return self.contents.parts(self.before[key], offsets, sizes)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Begin and end of the intersection of two boxes; None if it is empty."""
    ends = zip(offsets, sizes, others, other_sizes, strict=True)
    low = [max(a, b) for a, b in zip(offsets, others, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in ends]
    return None if any(a >= b for a, b in zip(low, high, strict=True)) else (low, high)


class Extent(Protocol):
    """The bytes of `data` in a container, and its total `length`."""

    @property
    def data(self) -> int: ...

    @property
    def length(self) -> int: ...


Extents = Callable[[str, tuple[int, ...]], Extent]
"""The extent of the container for a tensor of this dtype and these sizes."""


class _SharedContents(NamedTuple):
    data: int
    length: int


def list_extents(
    pieces: Iterable[tuple[str, tuple[int, ...]]], extents: Extents
) -> list[list[Any]]:
    """The index entries for `pieces` (dtype and sizes), one per distinct kind."""
    listed = []
    for dtype, sizes in sorted(set(pieces)):
        extent = extents(dtype, sizes)
        listed.append([dtype, sizes, extent.data, extent.length])
    return listed


def read_extents(listed: Any) -> Extents:
    """The extents that an index lists. Raises `ValueError` or `TypeError` for invalid entries. The
    returned function raises `DataError` for a kind that is not listed."""
    known: dict[tuple[str, tuple[int, ...]], _SharedContents] = {}
    for dtype, sizes, data, length in listed:
        numbers = [*sizes, data, length]
        if not are_numbers(numbers) or length < data:
            raise ValueError(f"a container of {dtype} {sizes} makes no sense")
        known[dtype, tuple(sizes)] = _SharedContents(data, length)

    def extent(dtype: str, sizes: tuple[int, ...]) -> Extent:
        if (dtype, sizes) not in known:
            raise DataError(f"the index does not say how long a container of {dtype} {sizes} is")
        return known[dtype, sizes]

    return extent


def are_numbers(values: Iterable[Any]) -> bool:
    """Whether all are non-negative integers."""
    return all(type(number) is int and number >= 0 for number in values)
