"""Random numbers that samples take while they are fetched: augmentation, masking.

In this process the loop fetches one micro batch ahead of what it trains on. So that one draws
before the state of the generators that a checkpoint holds, and those that follow draw after it. In
a loader's workers each micro batch draws from generators that its number seeds.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class _Ahead:
    """The micro batch that had been fetched ahead."""

    number: int
    before_fetch: dict[str, Any]
    resume: Callable[[], None]


class Draws:
    """Told of each micro batch that is about to be fetched, and the end, counted from 1."""

    def __init__(self) -> None:
        self.before_fetch: dict[str, Any] | None = None
        """The generators before the last one was fetched."""
        self._continued: _Ahead | None = None
        self._ahead: _Ahead | None = None

    def continue_after(
        self, micro_batches: int, before_fetch: dict[str, Any], resume: Callable[[], None]
    ) -> None:
        """The next epoch trains on `micro_batches`; the one after them was fetched ahead, and
        `resume` follows that.
        """
        self._continued = _Ahead(micro_batches + 1, before_fetch, resume)

    def begin(self) -> None:
        """An epoch begins, or is continued."""
        self._ahead, self._continued = self._continued, None

    def fetch(self, number: int) -> None:
        """Micro batch `number` is fetched now."""
        ahead = self._ahead
        if ahead is not None and number == ahead.number:
            _set_generators(ahead.before_fetch)
        elif ahead is not None and number > ahead.number:
            ahead.resume()
            self._ahead = None
        self.before_fetch = _generators()


class WorkerDraws:
    """What seeds the workers of a loader, each micro batch anew; `rank` draws unlike the others."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        self._collate, self._prepare = loader.collate_fn, loader.worker_init_fn
        self._workers, self._seed = loader.num_workers, (seed, rank)
        self._epoch, self._number = 0, 0
        loader.collate_fn, loader.worker_init_fn = self.collate, self.prepare

    def begin(self, epoch: int, micro_batches: int) -> None:
        """Workers that start now fetch what comes after `micro_batches` of an epoch."""
        self._epoch, self._number = epoch, micro_batches

    def prepare(self, worker: int) -> None:
        """In a worker that starts: its first micro batch comes next."""
        if self._prepare is not None:
            self._prepare(worker)
        self._number += worker
        self._seed_all()

    def collate(self, samples: Any) -> Any:
        """In a worker: the last part of a micro batch; the one after it comes next."""
        batch = self._collate(samples)
        self._number += self._workers
        self._seed_all()
        return batch

    def _seed_all(self) -> None:
        key = repr((*self._seed, self._epoch, self._number)).encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest())
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def _generators() -> dict[str, Any]:
    """Python's, NumPy's and torch's on the CPU, as a file of weights only takes them."""
    name, keys, *rest = np.random.get_state()
    numpy = (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def _set_generators(states: dict[str, Any]) -> None:
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
