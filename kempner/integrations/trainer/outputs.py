"""`checkpoint-<step>` in a Trainer's `output_dir`, and which of them it calls the best."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from kempner.run.output.logs import logger


class Outputs:
    """Links in `folder` to the checkpoints that kempner has committed, each at `committed(step)`.

    Only where `writes`, on rank 0, are they made and removed.
    """

    def __init__(self, folder: Path, committed: Callable[[int], Path], writes: bool) -> None:
        self._folder, self._committed, self._writes = folder, committed, writes
        self.kept: set[int] = set()
        """The steps of the checkpoints that the Trainer itself has asked for."""

    def link_to(self, step: int) -> str:
        """The name by which the Trainer knows the checkpoint of `step`."""
        return str(self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def link(self, steps: Iterable[int]) -> None:
        """Have the links lead to these commits, where people and the Trainer look for them."""
        if not self._writes:
            return
        for step in steps:
            link = Path(self.link_to(step))
            target = self._committed(step) / link.name
            if not target.exists():  # retention has deleted it
                continue
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                with suppress(FileExistsError):
                    link.symlink_to(os.path.relpath(target, self._folder))
            except OSError as error:
                logger().warning("cannot link to the checkpoint", step=step, error=str(error))

    def remove_old(self) -> None:
        """Remove links to checkpoints that retention has deleted."""
        if self._writes:
            for link in self._folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                if link.is_symlink() and not link.exists():
                    link.unlink(missing_ok=True)

    def best_checkpoint(self, state: Any, before: str | None) -> str | None:
        """What the Trainer alone would call its best checkpoint.

        That is the one of the best step if it has asked for it, else still `before`.
        """
        best = state.best_global_step
        return self.link_to(best) if best and best in self.kept else before

    def pinned(self, state: Any) -> frozenset[int]:
        """The steps whose checkpoints may still be loaded as the best."""
        named = str(state.best_model_checkpoint or "").rpartition("-")[2]
        steps = {state.best_global_step or 0, int(named) if named.isdigit() else 0}
        return frozenset(steps - {0})
