"""The run of one Trainer: its checkpoints, its place in the data, and what it goes on from; and
what of its settings cannot be resumed exactly, and is refused (docs/trainer.md lists the same).

A checkpoint is written where the Trainer writes one, or, for a stop, directly after a step. What
the Trainer would still have done after that step (evaluate, judge the best, save, end the epoch)
is noted in it as due, and done after the resume, before the next step.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from transformers import set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from kempner.checkpoint.format.manifest import decode
from kempner.checkpoint.format.names import MANIFEST
from kempner.checkpoint.manager import FolderCheckpoints
from kempner.checkpoint.store.retention import Keep
from kempner.integrations.transformers_trainer.state import (
    DataPlace,
    DueWork,
    Grid,
    TrainerPlace,
    TrainerProgress,
    callback_states,
    give_back,
    held_by,
    steps_to_go,
)
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.training.own_loop import OwnLoop
from kempner.training.session import Session
from kempner.training.vote import VoteResult


class Outputs:
    """Links in `folder` to the checkpoints that kempner has committed, each at `committed(step)`.
    Only where `writes`, on rank 0, are they made and removed."""

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
        """What the Trainer alone would call its best checkpoint. That is the one of the best step
        if it has asked for it, else still `before`."""
        best = state.best_global_step
        return self.link_to(best) if best and best in self.kept else before

    def pinned(self, state: Any) -> frozenset[int]:
        """The steps whose checkpoints may still be loaded as the best."""
        named = str(state.best_model_checkpoint or "").rpartition("-")[2]
        steps = {state.best_global_step or 0, int(named) if named.isdigit() else 0}
        return frozenset(steps - {0})


@dataclass(frozen=True)
class PreviousRun:
    """The checkpoint that a run goes on from: `source` is what the Trainer wrote, on `ranks` ranks,
    of which there are `ranks_now`; `progress` stands beside it, but in a run of before there was
    any."""

    source: Path
    step: int
    ranks: int
    ranks_now: int
    progress: TrainerProgress | None

    @classmethod
    def read(cls, folder: Path, step: int, trainer: Any) -> PreviousRun:
        manifest = folder / MANIFEST
        ranks = decode(manifest.read_bytes(), manifest).identity.world
        arguments = trainer.args
        progress = TrainerProgress.load(folder, arguments.process_index, arguments.world_size)
        source = folder / f"{PREFIX_CHECKPOINT_DIR}-{step}"
        return cls(source, step, ranks, arguments.world_size, progress)

    def place(self, grid: Grid) -> TrainerPlace:
        if self.progress is not None and self.progress.place is not None:
            return self.progress.place
        return TrainerPlace.of_step(self.step, self.ranks, grid, self.ranks_now)

    def plan(self, values: tuple[Any, ...], grid: Grid, arguments: Any) -> tuple[Any, ...]:
        """The Trainer's `set_initial_training_values`, where a step takes more or fewer samples
        than before: how many epochs and steps there are then in all."""
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
    """The generators of random numbers, as they were when the checkpoint was written. Those of
    another number of ranks are seeded anew, by the step."""

    def __init__(self, trainer: Any, before: PreviousRun) -> None:
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


def bring_back(trainer: Any, before: PreviousRun, generators: Generators) -> None:
    """When the Trainer is about to train: make up what it had yet to do at the checkpoint."""
    progress = before.progress or TrainerProgress(logged=before.step, first_step=before.step)
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


def _finish_step(trainer: Any, progress: TrainerProgress) -> None:
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


_STATE = "trainer_state.json"


@dataclass
class StepEnd:
    """What is known of the end of the last step. A stop has cut off `evaluate` and `save`; `forced`
    is that the next save is kempner's own wish."""

    evaluate: bool = False
    save: bool = False
    forced: bool = False
    ends_epoch: bool = False
    grad_norm: Any = None
    learning_rate: float | None = None
    start_time: float | None = None


class TrainerRun:
    """What `trainer` asks in its loop, on every rank in the same order."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self.session = trainer, session
        self.agreed = VoteResult()
        """What the ranks have agreed on in their last vote."""
        self.writing_to: Path | None = None
        """The folder that becomes the next checkpoint, while it is written."""
        self.step_end = StepEnd()
        self.code: ExitCode | None = None
        """How the loop has ended."""
        arguments, world = trainer.args, session.ranks.world
        seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
        self._checkpoints = FolderCheckpoints(
            session.context(optimizer=None, seed=seed),
            self._write_into,
            keep=Keep(last=sys.maxsize),
            durations=session.durations,
        )
        outputs = Path(str(arguments.output_dir))
        self._outputs = Outputs(outputs, self._checkpoints.path, writes=world.rank == 0)
        self.data = DataPlace(world, arguments.gradient_accumulation_steps, seed)

    def restore(self) -> Path | None:
        """The newest checkpoint that verifies, to be loaded by the Trainer; None if there is none.
        Raises `DataError`."""
        found = self._checkpoints.restore()
        self.loop = OwnLoop(self.session, self._checkpoints, found[0] if found else None)
        self.before: PreviousRun | None = None
        self.generators: Generators | None = None
        if found is None:
            return None
        step = found[0].step
        self.before = PreviousRun.read(found[1], step, self._trainer)
        self.generators = Generators(self._trainer, self.before)
        if self.before.progress is not None:
            self._outputs.kept = set(self.before.progress.kept)
        self._outputs.link({step, *self._outputs.kept})
        self.session.ranks.broadcast(None)  # no rank looks for a link before it is there
        return self.before.source

    def plan(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """What `set_initial_training_values` of the Trainer gives, from where the run goes on."""
        self.data.cut(micro_batches=values[5])
        if self.before is None:
            return values
        return self.before.plan(values, self.data.grid, self._trainer.args)

    def begin(self, epochs: int, micro_batches: int) -> tuple[int, int]:
        """The epoch and the micro batches in it after which the data go on; as the Trainer would
        say of a checkpoint that is none of kempner's."""
        grid = self.data.grid
        place = TrainerPlace(
            epochs, micro_batches * grid.batch, grid.per_step, self.data.world.size
        )
        if self.before is not None:
            place = self.before.place(grid)
        leg = self.data.continue_at(place, self.load_generators)
        if self.before is not None:
            self._say_what_changed(place)
        return place.epoch, leg.done

    def load_generators(self) -> None:
        """Training goes on: its random numbers are those that come next; once."""
        if self.generators is not None:
            self.generators.resume()

    def bring_back(self) -> Any:
        """Training is about to begin: the Trainer is where it was; its control after that."""
        trainer, data = self._trainer, self.data
        self.loop.begin()
        if self.before is not None and self.generators is not None:
            bring_back(trainer, self.before, self.generators)
            data.leave_epoch(trainer.control.should_epoch_stop)
        self.step_end = StepEnd()
        return trainer.control

    def save(self) -> None:
        """Have the Trainer write a checkpoint, and commit it; once for a step."""
        step, state = self.loop.train_state.step, self._trainer.state
        if not self.step_end.forced:
            self._outputs.kept.add(step)
        if self._checkpoints.committed_step != step:
            self._checkpoints.keep_only(self._keep())
            self.loop.save(self.agreed)
        if self._checkpoints.committed_step == step:
            self._outputs.link([step])
        else:
            self._outputs.kept.discard(step)
        state.best_model_checkpoint = self._outputs.best_checkpoint(
            state, state.best_model_checkpoint
        )

    def leave(self) -> None:
        """Commit what can be, and part from the other ranks. Raises `SystemExit` if the run is to
        be started again."""
        self.code = self.loop.leave(self.agreed)
        self._outputs.remove_old()
        if self.code is not ExitCode.COMPLETED:
            raise SystemExit(int(self.code))

    def _write_into(self, path: Path) -> None:
        state, arguments = self._trainer.state, self._trainer.args
        limit, arguments.save_total_limit = arguments.save_total_limit, None
        self.writing_to, best = path, state.best_model_checkpoint
        try:
            self._trainer.write_own_checkpoint()
            self._name_best(path, best)
            self._progress().save(path, arguments.process_index)
        finally:
            self.writing_to, arguments.save_total_limit = None, limit

    def _name_best(self, path: Path, before: str | None) -> None:
        """The Trainer's state names the best checkpoint by its path, which is a link's here."""
        state = self._trainer.state
        best, written = self._outputs.best_checkpoint(state, before), state.best_model_checkpoint
        state.best_model_checkpoint = best
        if best != written and self._trainer.args.should_save:
            folder = path / Path(self._outputs.link_to(state.global_step)).name
            state.save_to_json(str(folder / _STATE))

    def _progress(self) -> TrainerProgress:
        trainer, end = self._trainer, self.step_end
        earlier = self.before.progress if self.before else None
        seconds = 0.0 if end.start_time is None else time.time() - end.start_time
        return TrainerProgress(
            place=self.data.place(self._epoch_is_over()),
            due=self._due(),
            loss=trainer._tr_loss,
            total_loss=trainer._total_loss_scalar,
            logged=trainer._globalstep_last_logged,
            first_step=getattr(trainer, "_initial_global_step", 0),  # transformers 5.4 has none
            seconds=seconds + (earlier.seconds if earlier else 0.0),
            kept=tuple(sorted(self._outputs.kept)),
            callbacks=callback_states(trainer),
            held=held_by(trainer),
        )

    def _due(self) -> DueWork:
        control, state, end = self._trainer.control, self._trainer.state, self.step_end
        left = control.should_training_stop or control.should_epoch_stop
        return DueWork(
            evaluate=end.evaluate,
            save=end.save,
            epoch_end=not end.ends_epoch and (left or self.data.epoch_is_over),
            ends=control.should_training_stop and state.global_step < state.max_steps,
            grad_norm=None if end.grad_norm is None else float(end.grad_norm),
            learning_rate=end.learning_rate,
        )

    def _epoch_is_over(self) -> bool:
        """Whether the next step is one of the next epoch, as far as the data go."""
        control = self._trainer.control
        ended = self.step_end.ends_epoch and not control.should_training_stop
        return self.data.epoch_is_over or control.should_epoch_stop or ended

    def _keep(self) -> Keep:
        """As many as `save_total_limit` says, two at least, and those that may be the best."""
        limit = self._trainer.args.save_total_limit
        last = sys.maxsize if limit is None else max(2, limit)
        return Keep(last=last, pinned=self._outputs.pinned(self._trainer.state))

    def _say_what_changed(self, place: TrainerPlace) -> None:
        ranks, per_step = self.data.world.size, self.data.grid.per_step
        if place.ranks != ranks:
            self.session.say(
                f"on {ranks} ranks, before on {place.ranks}: no sample is repeated or missed; "
                "generators of random numbers are seeded anew"
            )
        if place.per_step != per_step:
            self.session.say(
                f"a step takes {per_step} samples from here on, before {place.per_step}"
            )


LIMITS = {
    "save_only_model": "its checkpoints hold no optimizer to go on with; leave it False",
    "auto_find_batch_size": "each start would find another batch size; give the one that fits",
    "enable_jit_checkpoint": "kempner answers the stop signals; leave it False",
    "ignore_data_skip": "a resumed epoch would begin anew; leave it False, a place in a data set "
    "that has a length is found without reading what is before it",
    "sync_ref_model": "no checkpoint holds the reference model as it is then; leave it False",
    "use_vllm": "vLLM's random numbers are in no checkpoint; leave it False",
    "DeepSpeed": "its checkpoints were not tried under kempner; train without it",
    "FSDP": "its checkpoints were not tried under kempner; train without it, or write the loop "
    "with survive",
}
"""Settings that are refused; why, and what to do instead."""


def refuse_inexact(trainer: Any) -> None:
    """Raise `UsageError`, on all ranks alike, for a setting that could not be resumed exactly."""
    engines = {"DeepSpeed": "is_deepspeed_enabled", "FSDP": "is_fsdp_enabled"}
    for name, why in LIMITS.items():
        owner = trainer if name in engines else trainer.args
        if getattr(owner, engines.get(name, name), False):
            raise UsageError(f"surviving(...): {name} cannot be resumed exactly: {why}")
