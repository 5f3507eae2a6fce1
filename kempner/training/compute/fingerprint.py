"""Fingerprints of tensors by their bits, which do not depend on how tensors are sharded.

That of a tensor is the sum over its elements of the bits, as an integer, times an odd number for
each dimension, which follows from the element's index there, modulo 2^64; times an odd number that
follows from the tensor's name. So the sum of the parts of all shards is that of the whole, in any
order, and a single bit that flips always changes it: an odd factor makes no difference zero.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.format.shard_plan import chunk_of
from kempner.checkpoint.tensors.file_buffer import tensor_specs
from kempner.checkpoint.tensors.state import INTEGERS, Binding, local_parts
from kempner.run.control.heartbeat import Waiting, untimed

_WORD = 4
"""Bytes: a longer element is taken as several, so that every bit is multiplied by 32 of a key."""

_SLAB = {"cpu": 1 << 16, "cuda": 1 << 26}
"""Elements at once: what fits into the cache of a core, or a few per cent of a GPU's memory."""

_SMALL = 1 << 12
"""Words of a tensor that is not worth operations of its own."""

_CPU = torch.device("cpu")
_BELOW = (1 << 64) - 1


def fingerprint(tensor: Tensor, offsets: Sequence[int] | None = None) -> Tensor:
    """The fingerprint of a plain tensor, without a name's factor: an int64 scalar on its device, by
    operations that do not wait. `offsets` is where it begins in the tensor that it is a part of.
    """
    return _sum(_bits(tensor), *_odd_numbers(tensor, offsets))


def _bits(tensor: Tensor) -> Tensor:
    """As integers, [rows, words]; shares the memory of a tensor that is contiguous."""
    tensor = tensor.detach()
    matrix = tensor.reshape(*tensor.shape[:1] or (1,), math.prod(tensor.shape[1:])).contiguous()
    return matrix.view(INTEGERS[min(tensor.element_size(), _WORD)])


def _odd_numbers(tensor: Tensor, offsets: Sequence[int] | None = None) -> tuple[Tensor, Tensor]:
    """Those of rows and of columns of `_bits`."""
    shape = tuple(tensor.shape) or (1,)
    starts = tuple(offsets or ()) or (0,) * len(shape)
    words = max(1, tensor.element_size() // _WORD)
    rows = _keys(0, starts[0], shape[0], tensor.device)
    return rows, _columns(starts[1:], shape[1:], words, tensor.device)


def _sum(bits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    slab = max(1, _SLAB.get(bits.device.type, _SLAB["cpu"]) // max(1, len(columns)))
    if len(rows) <= slab:
        return _weighed(bits, rows, columns)
    pieces = zip(torch.split(bits, slab), torch.split(rows, slab), strict=True)
    return torch.stack([_weighed(piece, keys, columns) for piece, keys in pieces]).sum()


def _weighed(bits: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    words = bits.to(torch.int64)
    if words.device.type != "cpu":  # GPUs multiply no matrices of integers
        return words.mul_(columns).sum(1).mul_(rows).sum()
    return torch.dot(torch.mv(words.t(), rows), columns)


def name_key(name: str) -> int:
    """The odd factor of a name: `model.<parameter>`, `optimizer.<parameter>.<entry>`, ..."""
    return _signed(int.from_bytes(blake2b(name.encode(), digest_size=8).digest(), "little") | 1)


def text_of(value: int) -> str:
    """A fingerprint, an int64 as Python has it, in 16 hexadecimal digits."""
    return f"{value & _BELOW:016x}"


def summed(parts: Tensor, waiting: Waiting = untimed) -> Tensor:
    """The sum over all ranks, in place, of what `StateFingerprint.local` gives or its sum."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        with waiting("the fingerprint"):
            dist.all_reduce(parts)  # integers modulo 2^64: in any order
    return parts


class TableFingerprint:
    """Fingerprints of a table of tensors, by name, each counted once over the `world`: a replica by
    the rank that would save it. The tensors are those whose memory the table has now."""

    def __init__(self, table: Mapping[str, Tensor], rank: int, world: int) -> None:
        """Raises `UsageError` for DTensors whose mesh is not the whole world."""
        self.names = list(table)
        local = local_parts(table.values())
        self._device = max((t.device for t in local), key=lambda d: d.type, default=_CPU)
        chunks = [chunk_of(spec, rank) for spec in tensor_specs(table, world)]
        self._large: list[tuple[Tensor, Tensor, Tensor]] = []
        self._small: list[Tensor] = []
        numbers, keys, nothing = list[int](), list[int](), torch.empty(0, dtype=torch.int64)
        small_keys, owners = [nothing], [nothing]
        for number, (name, tensor, chunk) in enumerate(zip(table, local, chunks, strict=True)):
            if chunk is None:
                continue
            rows, columns = _odd_numbers(tensor, chunk.offsets)
            if len(rows) * len(columns) > _SMALL or not tensor.is_contiguous():
                self._large.append((tensor, rows, columns))
                numbers.append(number)
                keys.append(name_key(name))
                continue
            # Small ones become one vector: operations cost more than their work on few elements.
            self._small.append(_bits(tensor).view(-1))
            products = (rows[:, None] * columns).flatten() * name_key(name)
            small_keys.append(products.cpu())
            owners.append(torch.full((len(products),), number))
        self._large_keys, self._places = (
            torch.tensor(each, dtype=torch.int64, device=self._device) for each in (keys, numbers)
        )
        self._small_keys, self._owners = (
            torch.cat(each).to(self._device) for each in (small_keys, owners)
        )

    def local(self) -> Tensor:
        """This rank's part of each tensor's fingerprint, [names], int64; without communication."""
        parts = torch.zeros(len(self.names), dtype=torch.int64, device=self._device)
        if self._small:
            words = torch.cat([bits.to(self._device) for bits in self._small]).to(torch.int64)
            parts.index_add_(0, self._owners, words.mul_(self._small_keys))
        if self._large:
            own = [
                _sum(_bits(t), rows, columns).to(self._device) for t, rows, columns in self._large
            ]
            parts.index_add_(0, self._places, torch.stack(own).mul_(self._large_keys))
        return parts


class StateFingerprint:
    """Fingerprints of all that a checkpoint holds of a model and its optimizer, under the names of
    `kempner.checkpoint.tensors.state`."""

    def __init__(self, model: nn.Module, optimizer: Optimizer, rank: int, world: int) -> None:
        self._model, self._optimizer, self._place = model, optimizer, (rank, world)
        self._bind()

    def _bind(self) -> None:
        self._binding = Binding(self._model, self._optimizer)
        self._of_table = TableFingerprint(self._binding.table, *self._place)

    @property
    def names(self) -> list[str]:
        """Of the tensors that the last `local` was of."""
        return self._of_table.names

    def local(self) -> Tensor:
        """As `TableFingerprint.local`, of the state as it is; its sum is this rank's part of that
        of the state. Raises as `kempner.checkpoint.tensors.state.capture`."""
        if not self._binding.intact():
            self._bind()
        self._binding.read_numbers()
        return self._of_table.local()


@lru_cache(1 << 12)
def _keys(dimension: int, start: int, length: int, device: torch.device) -> Tensor:
    """The odd numbers of some indices of a dimension, [length]: splitmix64 (Steele, Lea and Flood,
    "Fast splittable pseudorandom number generators", OOPSLA 2014) of the index."""
    state = torch.arange(start + 1, start + length + 1, dtype=torch.int64)
    mixed = state * _signed(0x9E3779B97F4A7C15) + _signed(name_key(f"dimension {dimension}"))
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ _shifted(mixed, shift)) * _signed(factor)
    return ((mixed ^ _shifted(mixed, 31)) | 1).to(device)


@lru_cache(1 << 12)
def _columns(
    starts: tuple[int, ...], sizes: tuple[int, ...], words: int, device: torch.device
) -> Tensor:
    """The products of the odd numbers of all dimensions behind the first, for each of the `words`
    of each element, flat."""
    product = torch.ones(1, dtype=torch.int64, device=device)
    of_words = _keys(-1, 0, words, device)
    for number, (start, size) in enumerate(zip(starts, sizes, strict=True), 1):
        product = (product[:, None] * _keys(number, start, size, device)).flatten()
    return (product[:, None] * of_words).flatten()


def _shifted(values: Tensor, by: int) -> Tensor:
    """Shifted to the right as unsigned numbers."""
    return (values >> by) & ((1 << (64 - by)) - 1)


def _signed(value: int) -> int:
    return (value & _BELOW) - ((value & (1 << 63)) << 1)
