"""The files of the user's own `ModelCheckpoint`s, from one start of a run to the next."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from kempner.run.output.logs import logger
from kempner.run.process.retry import describe

_HELD = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""What decides about the next file, and Lightning does not save."""


class ModelFiles:
    """Has each `ModelCheckpoint` go on as if the run had never been interrupted.

    Steps that are made again write their files again, under the same names: `record` is a file with
    the names that this run has written, of which a checkpoint may not know the newest. Lightning
    would take those for another run's, and write `...-v1.ckpt` beside them.
    """

    def __init__(self, trainer: Trainer, record: Path) -> None:
        self._trainer, self._record = trainer, record
        self._callbacks = [
            callback
            for callback in trainer.checkpoint_callbacks
            if isinstance(callback, ModelCheckpoint)
        ]
        self._without_folder = [c.state_key for c in self._callbacks if c.dirpath is None]
        self._left_over: set[str] = set()
        self._undo = ExitStack()

    def attach(self, left_over: set[str]) -> None:
        """Take part in the saves of all of them; `left_over` are the names in the record."""
        self._left_over = left_over
        for callback in self._callbacks:
            self._attach(callback)

    def _attach(self, callback: ModelCheckpoint) -> None:
        exists, save = callback.file_exists, callback._save_checkpoint

        def file_exists(filepath: Any, trainer: Trainer) -> bool:
            return str(filepath) not in self._left_over and exists(filepath, trainer)

        def save_checkpoint(trainer: Trainer, filepath: str) -> None:
            self._left_over.discard(filepath)
            self._note(filepath)
            save(trainer, filepath)

        for name, mine in (("file_exists", file_exists), ("_save_checkpoint", save_checkpoint)):
            setattr(callback, name, mine)
            self._undo.callback(vars(callback).pop, name, None)

    def detach(self) -> None:
        """Leave them as they were."""
        self._undo.close()

    def recorded(self) -> set[str]:
        """The files that this run has written."""
        try:
            return set(self._record.read_text().splitlines())
        except FileNotFoundError:
            return set()

    def _note(self, filepath: str) -> None:
        if not self._trainer.is_global_zero:
            return
        try:
            with open(self._record, "a") as record:
                record.write(f"{filepath}\n")
        except OSError as error:
            logger().warning("cannot note a file", file=filepath, error=describe(error))

    def find_folders_again(self, states: Mapping[str, Any]) -> None:
        """Where the user has named no folder, Lightning would begin a new one at each start."""
        for callback in self._callbacks:
            folder = states.get(callback.state_key, {}).get("dirpath")
            if folder and callback.state_key in self._without_folder:
                callback.dirpath = folder

    def state(self) -> dict[str, Any]:
        """What Lightning does not save of them."""
        return {c.state_key: {name: vars(c).get(name) for name in _HELD} for c in self._callbacks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Once Lightning has restored them."""
        for callback in self._callbacks:
            vars(callback).update(state.get(callback.state_key, {}))
            known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
            self._left_over -= known
