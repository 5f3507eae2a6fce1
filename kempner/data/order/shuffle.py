"""Shuffles samples: a keyed permutation per epoch, computed per index.

Position i of the endless order is sample `permuted(i % n)` of epoch `i // n`. Nothing is stored:
the state of a sampler is the one integer i, whatever the world, worker count or prefetch depth.

Large n: a Feistel network over Z_a x Z_b with a = ceil(sqrt(n)) and b = ceil(n / a), the
generalised Feistel cipher of Black and Rogaway, "Ciphers with Arbitrary Finite Domains"
(CT-RSA 2002). Indices that land on one of the fewer than a cells beyond n are sent through
again (cycle walking), which keeps it a bijection of [0, n). Small n: over halves of a few dozen
values six rounds would not be uniform, so the epoch is a table, sorted by keyed hashes.

The hash is the finaliser of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014). Every value is
defined here and not by a library's random generator, whose streams may change under a run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import cycle
from math import isqrt

import numpy as np
from numpy.typing import NDArray

PERMUTATION_VERSION = 1
"""Part of the data's fingerprint: a change to this file that moves any sample must raise it."""

MAX_SAMPLES = 2**48
SHUFFLE_BELOW = 4096  # corpora of fewer samples are shuffled by a table
_ROUNDS = 6
_MASK = 2**64 - 1
_GAMMA = 0x9E3779B97F4A7C15
_MULTIPLIER_1 = 0xBF58476D1CE4E5B9
_MULTIPLIER_2 = 0x94D049BB133111EB


@dataclass(frozen=True)
class SampleOrder:
    """The endless order over n samples under a seed. Raises ValueError unless 1 <= n <= 2**48 and 0
    <= seed < 2**64."""

    n: int
    seed: int

    def __post_init__(self) -> None:
        if not 1 <= self.n <= MAX_SAMPLES:
            raise ValueError(f"an order needs 1 to 2**48 samples, not {self.n}")
        if not 0 <= self.seed <= _MASK:
            raise ValueError(f"a seed is an integer from 0 to 2**64 - 1, not {self.seed}")

    def locate(self, position: int) -> tuple[int, int]:
        """(epoch, sample) at one position; ValueError if it is negative."""
        if position < 0:
            raise ValueError(f"positions start at 0, not {position}")
        epoch, index = divmod(position, self.n)
        if self.n < SHUFFLE_BELOW:
            return epoch, int(_table(self.n, self.seed, epoch)[index])
        return epoch, _network(self.n, self.seed, epoch).permute(index)

    def samples(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """The samples at `positions` [k]: what `locate` gives, many at a time."""
        if positions.size and positions.min() < 0:
            raise ValueError(f"positions start at 0, not {positions.min()}")
        epochs = positions // self.n
        indices = positions - epochs * self.n
        if np.all(epochs == epochs[:1]):
            return self._of_epoch(int(epochs[0]), indices) if epochs.size else indices
        out = np.empty_like(indices)
        for epoch in np.unique(epochs).tolist():
            at = epochs == epoch
            out[at] = self._of_epoch(epoch, indices[at])
        return out

    def _of_epoch(self, epoch: int, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.n < SHUFFLE_BELOW:
            return _table(self.n, self.seed, epoch)[indices]
        return _network(self.n, self.seed, epoch).permute_many(indices)


@dataclass(frozen=True)
class FeistelNetwork:
    """The keyed permutation of [0, n) that an even number of rounds makes. An index is a pair
    (left, right) of Z_a x Z_b. A round adds a hash of one half to the other and swaps them."""

    n: int
    right_side: int
    rounds: tuple[tuple[int, int], ...]
    """Key, below 2**63 so that adding to it cannot overflow, and size of the half that moves."""

    @classmethod
    def keyed(cls, n: int, keys: Sequence[int]) -> FeistelNetwork:
        """The network over n indices, one round for each key."""
        a = isqrt(n - 1) + 1
        b = -(-n // a)
        return cls(
            n, b, tuple((key >> 1, side) for key, side in zip(keys, cycle((a, b)), strict=False))
        )

    def permute(self, index: int) -> int:
        while True:
            left, right = divmod(index, self.right_side)
            for key, side in self.rounds:
                z = right + key
                z = ((z ^ (z >> 30)) * _MULTIPLIER_1) & _MASK
                z = ((z ^ (z >> 27)) * _MULTIPLIER_2) & _MASK
                z = (z ^ (z >> 31)) >> 24
                left, right = right, (left + (z * side >> 40)) % side
            index = left * self.right_side + right
            if index < self.n:
                return index

    def permute_many(self, indices: NDArray[np.int64]) -> NDArray[np.int64]:
        out = self._pass(indices.astype(np.uint64))
        while (beyond := np.flatnonzero(out >= self.n)).size:
            out[beyond] = self._pass(out[beyond])
        return out.astype(np.int64)

    def _pass(self, indices: NDArray[np.uint64]) -> NDArray[np.uint64]:
        width = np.uint64(self.right_side)
        left = indices // width
        right = indices - left * width
        for key, side in self.rounds:
            left, right = right, _moved(left, _hashed(right, key), np.uint64(side))
        return left * width + right


def _moved(half: NDArray[np.uint64], z: NDArray[np.uint64], side: np.uint64) -> NDArray[np.uint64]:
    """(half + z reduced to [0, side)) mod side: 40 bits of z times a side of at most 24 bits."""
    z >>= np.uint64(24)
    z *= side
    z >>= np.uint64(40)
    z += half
    # Below `side` the difference wraps around to a huge number: the minimum is the remainder.
    remainder: NDArray[np.uint64] = np.minimum(z, z - side)
    return remainder


def _hashed(x: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    z = x + np.uint64(key)
    z ^= z >> np.uint64(30)
    z *= np.uint64(_MULTIPLIER_1)
    z ^= z >> np.uint64(27)
    z *= np.uint64(_MULTIPLIER_2)
    z ^= z >> np.uint64(31)
    return z


@lru_cache(maxsize=64)
def _network(n: int, seed: int, epoch: int) -> FeistelNetwork:
    return FeistelNetwork.keyed(n, [_key(seed, epoch, number) for number in range(_ROUNDS)])


@lru_cache(maxsize=8)
def _table(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    hashes = _hashed(np.arange(n, dtype=np.uint64) * np.uint64(_GAMMA), _key(seed, epoch, 0))
    table = np.argsort(hashes, kind="stable")
    table.flags.writeable = False
    return table


def _key(*words: int) -> int:
    """64 bits that depend on every one of `words` and on their order."""
    key = 0
    for word in words:
        key = ((key ^ word) + _GAMMA) & _MASK
        key = ((key ^ (key >> 30)) * _MULTIPLIER_1) & _MASK
        key = ((key ^ (key >> 27)) * _MULTIPLIER_2) & _MASK
        key ^= key >> 31
    return key
