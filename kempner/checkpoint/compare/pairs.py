"""Compares two checkpoints tensor by tensor, a few in memory at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from torch import Tensor

from kempner.checkpoint.compare.sides import Side
from kempner.checkpoint.compare.values import Difference, common_dtype, difference
from kempner.checkpoint.convert.tensor_copy import dtype_of, length
from kempner.checkpoint.format.contents import Saved


class Verdict(StrEnum):
    """What two tensors of one name are to each other."""

    IDENTICAL = "identical"
    """Equal to the bit, and of one dtype."""
    EQUAL = "equal"
    """Of two dtypes, and equal once both are of the narrower one."""
    DIFFERENT = "different"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    SHAPE = "shape"
    """Of two shapes; the values were not compared."""
    DTYPE = "dtype"
    """Of two dtypes, one of them no floating-point type; the values were not compared."""


@dataclass(frozen=True)
class Pair:
    """A name, and what each side has under it; `difference` if the values were compared."""

    name: str
    a: Saved | None
    b: Saved | None
    difference: Difference | None = None

    @property
    def verdict(self) -> Verdict:
        """What they are to each other."""
        if self.a is None or self.b is None:
            return Verdict.ONLY_B if self.a is None else Verdict.ONLY_A
        if self.difference is None:
            return Verdict.SHAPE if self.a.shape != self.b.shape else Verdict.DTYPE
        if self.difference.different:
            return Verdict.DIFFERENT
        return Verdict.IDENTICAL if self.a.dtype == self.b.dtype else Verdict.EQUAL

    @property
    def equal(self) -> bool:
        """Whether no difference was found."""
        return self.verdict in (Verdict.IDENTICAL, Verdict.EQUAL)

    def to_json(self) -> dict[str, Any]:
        """A table of plain values; what does not apply is None."""
        compared = None if self.difference is None else asdict(self.difference)
        sides = {
            key: None if saved is None else {"shape": list(saved.shape), "dtype": saved.dtype}
            for key, saved in (("a", self.a), ("b", self.b))
        }
        return {"name": self.name, "verdict": self.verdict.value, **sides, "difference": compared}


def pairs(a: Side, b: Side, on_bytes: Callable[[int], None]) -> Iterator[Pair]:
    """Every tensor of both sides: first what values say nothing about, then as they are read.

    A table of tokens is compared without its rows of no token where they alone make the shapes
    differ. `on_bytes` is told the bytes that were read. Raises as the sides' `read`.
    """
    names = dict.fromkeys([*a.tensors, *b.tensors])
    found = {name: Pair(name, _shown(a, b, name), _shown(b, a, name)) for name in names}
    alike = [name for name, pair in found.items() if _comparable(pair)]
    yield from (pair for pair in found.values() if not _comparable(pair))
    reads = a.read(alike), b.read(alike)
    for name in alike:
        compared, size = _compare_next(*reads)
        yield replace(found[name], difference=compared)
        on_bytes(size)


Tensors = Iterator[tuple[str, Tensor]]


def _compare_next(a: Tensors, b: Tensors) -> tuple[Difference, int]:
    """The next tensor's difference, and the bytes of both; neither is kept."""
    (name, x), (same, y) = next(a), next(b)
    assert name == same
    rows = slice(min(len(x), len(y))) if x.ndim else ...
    return difference(x[rows], y[rows]), x.nbytes + y.nbytes


def bytes_to_read(a: Side, b: Side) -> int:
    """Bytes of all tensors that both sides have."""
    both = a.tensors.keys() & b.tensors.keys()
    return sum(length(side.tensors[name]) for side in (a, b) for name in both)


def _shown(side: Side, other: Side, name: str) -> Saved | None:
    """What a side has under a name: of a table of another length than the other's, tokens' rows."""
    saved, theirs = side.tensors.get(name), other.tensors.get(name)
    if saved is None or theirs is None or saved.shape == theirs.shape:
        return saved
    tokens = side.rows.get(name)
    return saved if tokens is None else replace(saved, shape=(tokens, *saved.shape[1:]))


def _comparable(pair: Pair) -> bool:
    if pair.a is None or pair.b is None or pair.a.shape != pair.b.shape:
        return False
    return common_dtype(dtype_of(pair.a), dtype_of(pair.b)) is not None
