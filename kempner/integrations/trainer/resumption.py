"""What a Trainer's run goes on from, and how the Trainer is brought to where it was."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from kempner.checkpoint.format.manifest import decode
from kempner.checkpoint.format.names import MANIFEST
from kempner.integrations.trainer.place import Grid, Place, steps_to_go
from kempner.integrations.trainer.progress import Progress, give_back


@dataclass(frozen=True)
class Before:
    """The checkpoint that a run goes on from: `source` is what the Trainer wrote, on `ranks` ranks,
    of which there are `ranks_now`; `progress` stands beside it, but in a run of before there was
    any.
    """

    source: Path
    step: int
    ranks: int
    ranks_now: int
    progress: Progress | None

    @classmethod
    def read(cls, folder: Path, step: int, trainer: Any) -> Before:
        """Of a committed folder, as this rank needs it."""
        manifest = folder / MANIFEST
        ranks = decode(manifest.read_bytes(), manifest).identity.world
        arguments = trainer.args
        progress = Progress.load(folder, arguments.process_index, arguments.world_size)
        source = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        return cls(source, step, ranks, arguments.world_size, progress)

    def place(self, grid: Grid) -> Place:
        """Where it stood in the data; `grid` is how this world cuts them."""
        if self.progress is not None and self.progress.place is not None:
            return self.progress.place
        return Place.of_step(self.step, self.ranks, grid, self.ranks_now)

    def plan(self, values: tuple[Any, ...], grid: Grid, arguments: Any) -> tuple[Any, ...]:
        """The Trainer's `set_initial_training_values`, where a step takes more or fewer samples
        than before: how many epochs and steps there are then in all.
        """
        place = self.place(grid)
        if place.per_step == grid.per_step or grid.samples is None:
            return values
        epochs, *between, max_steps = values
        if arguments.max_steps > 0:
            epochs = place.epoch + 1 + math.ceil((max_steps - self.step) / grid.updates)
        else:
            max_steps = self.step + steps_to_go(place, grid, float(arguments.num_train_epochs))
        return (epochs, *between, max_steps)


class Generators:
    """The generators of random numbers, as they were when the checkpoint was written.

    Those of another number of ranks are seeded anew, by the step.
    """

    def __init__(self, trainer: Any, before: Before) -> None:
        self._trainer, self._before = trainer, before
        self._kept: TemporaryDirectory[str] | None = None
        self._resumed = False

    def load(self) -> None:
        """Load them, or those that `keep` has kept."""
        before = self._before
        if self._kept is not None:
            self._trainer.load_generators(self._kept.name)
        elif before.ranks != before.ranks_now:
            set_seed(self._trainer.args.seed + before.step)
        else:
            self._trainer.load_generators(str(before.source))

    def keep(self) -> None:
        """As they are now they are to be loaded from here on."""
        kept = TemporaryDirectory(prefix="kempner-generators-")
        self._trainer._save_rng_state(kept.name)
        self._kept = kept

    def resume(self) -> None:
        """Load them, the first time that the next step asks for it."""
        if not self._resumed:
            self.load()
            self._resumed = True


def bring_back(trainer: Any, before: Before, generators: Generators) -> None:
    """When the Trainer is about to train: make up what it had yet to do at the checkpoint."""
    progress = before.progress or Progress(logged=before.step, first_step=before.step)
    if progress.loss is not None:
        trainer._tr_loss = progress.loss.to(trainer._tr_loss)
    trainer._total_loss_scalar = progress.total_loss
    trainer._globalstep_last_logged = progress.logged
    trainer._initial_global_step = progress.first_step
    give_back(trainer, progress.held)
    due, control = progress.due, trainer.control
    control.should_training_stop = due.ends or trainer.state.global_step >= trainer.state.max_steps
    if not due.anything:
        return
    generators.load()
    control.should_evaluate, control.should_save = due.evaluate, due.save
    _finish_step(trainer, progress)
    if due.epoch_end or _is_left(trainer.control):
        handler = trainer.callback_handler
        trainer.control = handler.on_epoch_end(trainer.args, trainer.state, trainer.control)
        _finish_step(trainer, progress)
    generators.keep()


def _finish_step(trainer: Any, progress: Progress) -> None:
    """Log, evaluate and save as the control says, as if the step had just been made."""
    trainer._maybe_log_save_evaluate(
        trainer._tr_loss,
        progress.due.grad_norm,
        trainer.model_wrapped,
        None,
        trainer.state.epoch,
        trainer.ignore_keys_for_eval,
        time.time(),
        learning_rate=progress.due.learning_rate,
    )


def _is_left(control: Any) -> bool:
    return bool(control.should_training_stop or control.should_epoch_stop)
