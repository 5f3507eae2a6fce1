"""Compares two checkpoints tensor by tensor, with a few in memory at a time.

Each side is a checkpoint of kempner, of `torch.distributed.checkpoint`, or a folder of safetensors
files. The caller makes the names of both sides match.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kempner.checkpoint.convert.export import MODEL
from kempner.checkpoint.convert.import_dcp import StockCheckpoint
from kempner.checkpoint.convert.import_safetensors import find_tensors
from kempner.checkpoint.convert.tensor_copy import Merged, Source, dtype_of, length
from kempner.checkpoint.format.contents import Saved
from kempner.checkpoint.tensors.state import INTEGERS
from kempner.run.process.exit_codes import DataError

_SLAB_ELEMENTS = 1 << 22
"""Elements compared at once; needs at most some 200 MB besides the tensors."""


@dataclass(frozen=True)
class TensorDifference:
    """The difference between two tensors.

    Both are converted to the dtype `compared_in`. Then `different` of `elements` differ, the first
    of them (row-major) at index `first`. The conversion changed `rounded` elements of the wider
    tensor. `max_abs` is the largest |a - b|, `max_rel` the largest |a - b| / max(|a|, |b|), both
    computed in float64 from the converted values, without the `not_finite` different elements where
    a or b is infinite or NaN.
    """

    elements: int
    compared_in: str
    different: int = 0
    rounded: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    not_finite: int = 0
    first: tuple[int, ...] | None = None


def common_dtype(a: torch.dtype, b: torch.dtype) -> torch.dtype | None:
    """The dtype in which tensors of two dtypes are compared: the one with fewer mantissa bits, or
    with the smaller range if those are equal. None if they differ and are not both
    floating-point."""
    if a == b:
        return a
    if not (a.is_floating_point and b.is_floating_point):
        return None
    return max(a, b, key=lambda dtype: (torch.finfo(dtype).eps, -torch.finfo(dtype).max))


def difference(a: Tensor, b: Tensor) -> TensorDifference:
    """Compare two tensors of the same shape that have a `common_dtype`. With one dtype, elements
    are equal if their bits are: 0 and -0 differ, and a NaN equals the same NaN. With two dtypes,
    they are compared after rounding to the narrower one, and all NaNs are equal."""
    dtype = common_dtype(a.dtype, b.dtype)
    assert dtype is not None
    found = TensorDifference(a.numel(), str(dtype).removeprefix("torch."))
    flat_a, flat_b = a.reshape(-1), b.reshape(-1)
    for start in range(0, a.numel(), _SLAB_ELEMENTS):
        piece = slice(start, start + _SLAB_ELEMENTS)
        found = _with_slab(found, flat_a[piece], flat_b[piece], dtype, start, a.shape)
    return found


def _with_slab(
    found: TensorDifference, a: Tensor, b: Tensor, dtype: torch.dtype, start: int, shape: torch.Size
) -> TensorDifference:
    one, other = a.to(dtype), b.to(dtype)
    differs = _differs(one, other)
    if a.dtype != b.dtype:
        differs &= ~(_is_nan(one) & _is_nan(other))
        found = replace(found, rounded=found.rounded + _changed(a, one) + _changed(b, other))
    count = int(differs.sum())
    if not count:
        return found
    first = found.first
    if first is None:
        position = start + int(differs.to(torch.uint8).argmax())
        first = tuple(int(index) for index in np.unravel_index(position, tuple(shape)))
    x, y = _numbers(one[differs]), _numbers(other[differs])
    finite = x.isfinite() & y.isfinite()
    x, y = x[finite], y[finite]
    apart = (x - y).abs()
    size = torch.maximum(x.abs(), y.abs()).clamp_min(torch.finfo(torch.float64).tiny)
    return replace(
        found,
        different=found.different + count,
        max_abs=max(found.max_abs, _largest(apart)),
        max_rel=max(found.max_rel, _largest(apart / size)),
        not_finite=found.not_finite + count - len(x),
        first=first,
    )


def _differs(a: Tensor, b: Tensor) -> Tensor:
    if a.dtype == torch.complex128:  # wider than any integer dtype
        return _differs(torch.view_as_real(a), torch.view_as_real(b)).any(-1)
    bits = INTEGERS[a.element_size()]
    return a.view(bits) != b.view(bits)


def _changed(before: Tensor, after: Tensor) -> int:
    """The number of elements that rounding changed."""
    if before.dtype == after.dtype:
        return 0
    return int(((after.to(before.dtype) != before) & ~_is_nan(before)).sum())


def _is_nan(tensor: Tensor) -> Tensor:
    return tensor.float().isnan() if tensor.element_size() == 1 else tensor.isnan()


def _numbers(tensor: Tensor) -> Tensor:
    return tensor.to(torch.complex128 if tensor.is_complex() else torch.float64)


def _largest(values: Tensor) -> float:
    return float(values.max()) if len(values) else 0.0


Read = Callable[[Iterable[str]], Iterator[tuple[str, Tensor]]]

SAFETENSORS = "safetensors"  # the `kind` of a Hugging Face folder
_TABLES = (f"{MODEL}embed.weight", f"{MODEL}output.weight")
"""The tensors with a row for each token id, possibly followed by padding rows."""


@dataclass(frozen=True)
class Side:
    """One side of a comparison. `kind` names its format. `read` yields whole tensors in the order
    of the given names, and keeps at most 256 MiB, or one tensor, in memory. `rows` has the number
    of token rows of each table (the others are padding), if known. `merged` is the model, with
    the adapter of a checkpoint merged into it, where that has one."""

    path: Path
    kind: str
    tensors: Mapping[str, Saved]
    read: Read
    rows: Mapping[str, int] = field(default_factory=dict)
    merged: Side | None = None


def open_kempner(checkpoint: Path) -> Side:
    """A checkpoint of kempner; reading verifies each block."""
    source = Source.open(checkpoint)
    tokens = source.manifest.identity.model.get("vocab_size")
    rows = dict.fromkeys(_TABLES, tokens) if isinstance(tokens, int) else {}
    side = Side(checkpoint, "kempner", source.tensors, source.read, rows)
    if source.base is None:
        return side
    whole = Merged.of(source)
    return replace(side, merged=replace(side, tensors=whole.tensors, read=whole.read))


def open_dcp(path: Path) -> Side:
    """A checkpoint of `torch.distributed.checkpoint`, with kempner's tensor names."""
    foreign = StockCheckpoint.open(path)
    tensors = {spec.key: Saved(spec.shape, spec.dtype) for spec in foreign.specs()}
    return Side(path, "torch.distributed.checkpoint", tensors, foreign.read)


def open_safetensors(folder: Path) -> Side:
    """A Hugging Face folder, with its own tensor names."""
    located = find_tensors(folder)
    if not located:
        raise DataError(f"{folder} has no tensors")
    tensors = {name: Saved(found.shape, found.dtype) for name, found in located.items()}
    return Side(
        folder, SAFETENSORS, tensors, lambda names: ((name, located[name].read()) for name in names)
    )


def model_of(side: Side) -> Side:
    if side.merged is not None:
        return side.merged
    return without(side, {name for name in side.tensors if not name.startswith(MODEL)})


def without(side: Side, names: Collection[str]) -> Side:
    left = {name: saved for name, saved in side.tensors.items() if name not in names}
    return replace(side, tensors=left)


def renamed(side: Side, names: Mapping[str, str]) -> Side:
    """Rename tensors by `names`, a map from old to new names; others keep theirs."""
    before = {names.get(name, name): name for name in side.tensors}
    tensors = {name: side.tensors[theirs] for name, theirs in before.items()}

    def read(wanted: Iterable[str]) -> Iterator[tuple[str, Tensor]]:
        wanted = list(wanted)
        found = side.read([before[name] for name in wanted])
        return ((name, next(found)[1]) for name in wanted)  # keeps no tensor alive

    return replace(side, tensors=tensors, read=read)


class TensorVerdict(StrEnum):
    IDENTICAL = "identical"  # equal to the bit, and of one dtype
    EQUAL = "equal"  # of two dtypes, equal after rounding to the narrower one
    DIFFERENT = "different"
    ONLY_A = "only in A"
    ONLY_B = "only in B"
    SHAPE = "shape"  # of two shapes; the values were not compared
    DTYPE = "dtype"
    """Of two dtypes, not both floating-point; the values were not compared."""


@dataclass(frozen=True)
class Pair:
    """A name with the tensor of each side; `difference` if the values were compared."""

    name: str
    a: Saved | None
    b: Saved | None
    difference: TensorDifference | None = None

    @property
    def verdict(self) -> TensorVerdict:
        if self.a is None or self.b is None:
            return TensorVerdict.ONLY_B if self.a is None else TensorVerdict.ONLY_A
        if self.difference is None:
            return TensorVerdict.SHAPE if self.a.shape != self.b.shape else TensorVerdict.DTYPE
        if self.difference.different:
            return TensorVerdict.DIFFERENT
        return TensorVerdict.IDENTICAL if self.a.dtype == self.b.dtype else TensorVerdict.EQUAL

    @property
    def equal(self) -> bool:
        return self.verdict in (TensorVerdict.IDENTICAL, TensorVerdict.EQUAL)

    def to_json(self) -> dict[str, Any]:
        """Plain values; None where not applicable."""
        compared = None if self.difference is None else asdict(self.difference)
        sides = {
            key: None if saved is None else {"shape": list(saved.shape), "dtype": saved.dtype}
            for key, saved in (("a", self.a), ("b", self.b))
        }
        return {"name": self.name, "verdict": self.verdict.value, **sides, "difference": compared}


def pairs(a: Side, b: Side, on_bytes: Callable[[int], None]) -> Iterator[Pair]:
    """Yield every tensor of both sides: first those whose values cannot be compared, then the
    others as they are read. If only padding rows make the shapes of a token table differ, they are
    left out. `on_bytes` gets the number of bytes read. Raises as the sides' `read`."""
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


def _compare_next(a: Tensors, b: Tensors) -> tuple[TensorDifference, int]:
    """Compare the next tensor of each side; returns the difference, and the bytes of both. Shapes
    can differ only in padding rows (`_shown`), which are left out."""
    (name, x), (same, y) = next(a), next(b)
    assert name == same
    rows = slice(min(len(x), len(y))) if x.ndim else ...
    return difference(x[rows], y[rows]), x.nbytes + y.nbytes


def bytes_to_read(a: Side, b: Side) -> int:
    both = a.tensors.keys() & b.tensors.keys()
    return sum(length(side.tensors[name]) for side in (a, b) for name in both)


def _shown(side: Side, other: Side, name: str) -> Saved | None:
    """A side's tensor; if its shape differs from the other side's, a table without padding rows."""
    saved, theirs = side.tensors.get(name), other.tensors.get(name)
    if saved is None or theirs is None or saved.shape == theirs.shape:
        return saved
    tokens = side.rows.get(name)
    return saved if tokens is None else replace(saved, shape=(tokens, *saved.shape[1:]))


def _comparable(pair: Pair) -> bool:
    if pair.a is None or pair.b is None or pair.a.shape != pair.b.shape:
        return False
    return common_dtype(dtype_of(pair.a), dtype_of(pair.b)) is not None
