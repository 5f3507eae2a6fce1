"""What a checkpoint contains and where: one view of DCP's `.metadata` and the compact index."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Saved:
    """A tensor as it was saved; `dtype` is torch's name for it, such as "bfloat16"."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Part:
    """A rectangular part of a tensor, and the container that holds it.

    `offsets` and `sizes` in elements, one per dimension; `start` and `length` in bytes of `file`.
    """

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    file: str
    start: int
    length: int


class Contents(Protocol):
    """The tensors of a checkpoint."""

    @property
    def tensors(self) -> Mapping[str, Saved]:
        """Every tensor, by its key."""
        ...

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Part]:
        """The stored parts of a tensor that overlap the box at `offsets` of `sizes` elements.

        Raises `DataError` if one of them is stored nowhere.
        """
        ...


@dataclass(frozen=True)
class Renamed:
    """The same tensors under other keys; `before` has what each of them is saved as."""

    contents: Contents
    before: Mapping[str, str]

    @property
    def tensors(self) -> Mapping[str, Saved]:
        """Every tensor, by its new key."""
        saved = self.contents.tensors
        return {key: saved[old] for key, old in self.before.items()}

    def parts(self, key: str, offsets: Sequence[int], sizes: Sequence[int]) -> Iterable[Part]:
        """As `Contents.parts`."""
        return self.contents.parts(self.before[key], offsets, sizes)


def overlap(
    offsets: Sequence[int], sizes: Sequence[int], others: Sequence[int], other_sizes: Sequence[int]
) -> tuple[list[int], list[int]] | None:
    """Where two boxes' common part begins and ends; None if they have nothing in common."""
    ends = zip(offsets, sizes, others, other_sizes, strict=True)
    low = [max(a, b) for a, b in zip(offsets, others, strict=True)]
    high = [min(a + n, b + m) for a, n, b, m in ends]
    return None if any(a >= b for a, b in zip(low, high, strict=True)) else (low, high)
