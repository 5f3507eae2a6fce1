"""Random numbers that samples take while they are fetched in this process: augmentation, masking.

The loop fetches one micro batch ahead of what it trains on. So that one draws before the state of
the generators that a checkpoint holds, and those that follow draw after it.
"""

from __future__ import annotations

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
        """In the next epoch so many are trained on: the one after them was fetched ahead, and
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
