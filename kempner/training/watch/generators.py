"""The global generators of `random` and NumPy, which each rank's checkpoints hold."""

from __future__ import annotations

import random
from typing import Any

import numpy as np

from kempner.checkpoint.registered.objects import Held

NAME = "random.generators"
"""Under which they are held: no name that a program could register."""


class GlobalGenerators:
    """They come back as the loop begins: what a program draws before it, it draws at each start."""

    def __init__(self) -> None:
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
        elif self._anew is not None:
            entropy = np.random.SeedSequence([seed % 2**64, *self._anew])
            ours, numpys = entropy.generate_state(2)
            random.seed(int(ours))
            np.random.seed(int(numpys))
        return self._anew is not None

    def _give(self) -> dict[str, Any]:
        return {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}

    def _take(self, saved: dict[str, Any]) -> None:
        self._saved, self._anew = saved, None

    def _draw_anew(self, saved: Any, step: int, rank: int) -> None:
        self._saved, self._anew = None, (step, rank)
