"""The run of one Trainer: its checkpoints, its place in the data, and its resume; and the settings
that cannot be resumed exactly, which are refused (listed in docs/trainer.md, too).

A checkpoint is written when the Trainer writes one or, for a stop, directly after a step. What the
Trainer would still have done after that step (evaluate, update the best checkpoint, save, end the
epoch) is noted as due, and done after the resume, before the next step."""

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
    extra_state,
    restore_extra_state,
    steps_to_go,
)
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.training.own_loop import OwnLoop
from kempner.training.session import Session
from kempner.training.vote import VoteResult


class Outputs:
    """Links in `folder` to the checkpoints that kempner has committed, each at `committed(step)`.
    Only changed if `writes`, on rank 0."""

    def __init__(self, folder: Path, committed: Callable[[int], Path], writes: bool) -> None:
        self._folder, self._committed, self._writes = folder, committed, writes
        self.kept: set[int] = set()
        """The steps of the checkpoints that the Trainer itself requested."""

    def link_to(self, step: int) -> str:
        """The path under which the Trainer knows the checkpoint of `step`."""
        return str(self._folder / f"{PREFIX_CHECKPOINT_DIR}-{step}")

    def link(self, steps: Iterable[int]) -> None:
        """Create the links to these commits, at the places where the Trainer writes its own."""
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
        """The best checkpoint as the Trainer alone would name it: that of the best step if the
        Trainer requested it, else still `before`."""
        best = state.best_global_step
        return self.link_to(best) if best and best in self.kept else before

    def pinned(self, state: Any) -> frozenset[int]:
        """The steps whose checkpoints may still be loaded as the best."""
        named = str(state.best_model_checkpoint or "").rpartition("-")[2]
        steps = {state.best_global_step or 0, int(named) if named.isdigit() else 0}
        return frozenset(steps - {0})


@dataclass(frozen=True)
class PreviousRun:
    """The checkpoint from which a run resumes: `source` is the Trainer's own, written on `ranks`
    ranks (there are `ranks_now`); `progress` is kempner's addition, None in a run of an earlier
    version."""

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
        """The `values` of the Trainer's `set_initial_training_values`, with the total epochs and
        steps corrected if a step takes more or fewer samples than before."""
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
    """Restores the random generators from the checkpoint; for another number of ranks they are
    seeded by the step."""

    def __init__(self, trainer: Any, before: PreviousRun) -> None:
        self._trainer, self._before = trainer, before
        self._kept: TemporaryDirectory[str] | None = None
        self._resumed = False

    def load(self) -> None:
        """Load them, or the states that `keep` has stored."""
        before = self._before
        if self._kept is not None:
            self._trainer.load_generators(self._kept.name)
        elif before.ranks != before.ranks_now:
            set_seed(self._trainer.args.seed + before.step)
        else:
            self._trainer.load_generators(str(before.source))

    def keep(self) -> None:
        """Store the present states, for `load` to restore from now on."""
        kept = TemporaryDirectory(prefix="kempner-generators-")
        self._trainer._save_rng_state(kept.name)
        self._kept = kept

    def resume(self) -> None:
        """Load them, at the first call only."""
        if not self._resumed:
            self.load()
            self._resumed = True


def restore_trainer(trainer: Any, before: PreviousRun, generators: Generators) -> None:
    """Restore the Trainer's state before it trains, and do the work that was due at the
    checkpoint."""
    progress = before.progress or TrainerProgress(logged=before.step, first_step=before.step)
    if progress.loss is not None:
        trainer._tr_loss = progress.loss.to(trainer._tr_loss)
    trainer._total_loss_scalar = progress.total_loss
    trainer._globalstep_last_logged = progress.logged
    trainer._initial_global_step = progress.first_step
    restore_extra_state(trainer, progress.held)
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
    """Log, evaluate and save as `control` says, as at the end of a step."""
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
    """The end of the last step. `evaluate` and `save` are work that a stop has cut off; `forced`:
    the next save is requested by kempner, not by the Trainer."""

    evaluate: bool = False
    save: bool = False
    forced: bool = False
    ends_epoch: bool = False
    grad_norm: Any = None
    learning_rate: float | None = None
    start_time: float | None = None


class TrainerRun:
    """The run of `trainer`, which calls its methods on every rank in the same order."""

    def __init__(self, trainer: Any, session: Session) -> None:
        self._trainer, self.session = trainer, session
        self.agreed = VoteResult()
        """The result of the ranks' last vote."""
        self.writing_to: Path | None = None
        """The folder of the checkpoint that is being written, if any."""
        self.step_end = StepEnd()
        self.code: ExitCode | None = None
        """The exit code with which the loop has ended; None before."""
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
        """The newest checkpoint that verifies, for the Trainer to load; None if there is none.
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
        self.session.ranks.broadcast(None)  # no rank looks for a link before it exists
        return self.before.source

    def plan(self, values: tuple[Any, ...]) -> tuple[Any, ...]:
        """The Trainer's initial training values, corrected for the place from which the run
        resumes."""
        self.data.cut(micro_batches=values[5])
        if self.before is None:
            return values
        return self.before.plan(values, self.data.grid, self._trainer.args)

    def begin(self, epochs: int, micro_batches: int) -> tuple[int, int]:
        """The epoch and the number of its micro batches that are done; the arguments are the
        Trainer's, which count for a checkpoint that is not kempner's."""
        grid = self.data.grid
        place = TrainerPlace(
            epochs, micro_batches * grid.batch, grid.per_step, self.data.world.size
        )
        if self.before is not None:
            place = self.before.place(grid)
        leg = self.data.continue_at(place, self.load_generators)
        if self.before is not None:
            self._report_changes(place)
        return place.epoch, leg.done

    def load_generators(self) -> None:
        """Restore the random generators when training continues; once."""
        if self.generators is not None:
            self.generators.resume()

    def begin_training(self) -> Any:
        """Restore the Trainer's state before its first step; its control afterwards."""
        trainer, data = self._trainer, self.data
        self.loop.begin()
        if self.before is not None and self.generators is not None:
            restore_trainer(trainer, self.before, self.generators)
            data.leave_epoch(trainer.control.should_epoch_stop)
        self.step_end = StepEnd()
        return trainer.control

    def save(self) -> None:
        """Have the Trainer write a checkpoint, and commit it, once per step."""
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
        """Make the final save and leave the other ranks. Raises `SystemExit` if the run is to be
        restarted."""
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
        """Correct the path of the best checkpoint in the Trainer's state, which is that of a
        link."""
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
            held=extra_state(trainer),
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
        """Whether the next step belongs to the next epoch."""
        control = self._trainer.control
        ended = self.step_end.ends_epoch and not control.should_training_stop
        return self.data.epoch_is_over or control.should_epoch_stop or ended

    def _keep(self) -> Keep:
        """The number in `save_total_limit`, at least two, and those that may be the best."""
        limit = self._trainer.args.save_total_limit
        last = sys.maxsize if limit is None else max(2, limit)
        return Keep(last=last, pinned=self._outputs.pinned(self._trainer.state))

    def _report_changes(self, place: TrainerPlace) -> None:
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
"""Settings that are refused, with the reason and what to do instead."""


def refuse_inexact(trainer: Any) -> None:
    """Raise `UsageError`, on all ranks alike, for a setting that could not be resumed exactly."""
    engines = {"DeepSpeed": "is_deepspeed_enabled", "FSDP": "is_fsdp_enabled"}
    for name, why in LIMITS.items():
        owner = trainer if name in engines else trainer.args
        if getattr(owner, engines.get(name, name), False):
            raise UsageError(f"surviving(...): {name} cannot be resumed exactly: {why}")
