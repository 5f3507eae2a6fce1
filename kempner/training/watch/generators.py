"""The global generators of random numbers, which each rank's checkpoints hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch

from kempner.checkpoint.registered.objects import Held
from kempner.training.compute.seeds import set_rng

NAME = "random.generators"
"""Under which they are held: no name that a program could register."""


class GlobalGenerators:
    """Those of `random` and NumPy; with `torchs` those of torch, too, where no step seeds them.

    They come back as the loop begins: what a program draws before it, it draws at each start.
    """

    def __init__(self, torchs: bool = False) -> None:
        self._torchs = torchs
        self._saved: dict[str, Any] | None = None
        self._anew: tuple[int, int] | None = None

    def held(self) -> Held:
        """How a checkpoint holds them; earlier ones do not."""
        return Held(self._give, self._take, automatic=True, anew=self._draw_anew)

    def begin(self, seed: int) -> bool:
        """Continue their sequences; whether they begin anew, since the number of ranks differs."""
        if self._saved is not None:
            random.setstate(self._saved["random"])
            np.random.set_state(self._saved["numpy"])
            if self._torchs and "torch" in self._saved:  # not where `survive` has saved
                torch.set_rng_state(self._saved["torch"])
                if self._saved["cuda"] is not None and torch.cuda.is_available():
                    torch.cuda.set_rng_state(self._saved["cuda"])
        elif self._anew is not None:
            entropy = np.random.SeedSequence([seed % 2**64, *self._anew])
            ours, numpys = entropy.generate_state(2)
            random.seed(int(ours))
            np.random.seed(int(numpys))
            if self._torchs:
                step, rank = self._anew
                set_rng(seed, step, 0, rank)
        return self._anew is not None

    def _give(self) -> dict[str, Any]:
        states = {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        if not self._torchs:
            return states
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state() if on_gpu else None
        return {**states, "torch": torch.get_rng_state(), "cuda": cuda}

    def _take(self, saved: dict[str, Any]) -> None:
        self._saved, self._anew = saved, None

    def _draw_anew(self, saved: Any, step: int, rank: int) -> None:
        self._saved, self._anew = None, (step, rank)
