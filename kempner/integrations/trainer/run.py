"""The run of one Trainer: its checkpoints, its place in the data, and what it goes on from.

A checkpoint is written where the Trainer writes one, or, for a stop, directly after a step. What
the Trainer would still have done after that step (evaluate, judge the best, save, end the epoch)
is noted in it as due, and done after the resume, before the next step.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kempner.checkpoint.folders import FolderCheckpoints
from kempner.checkpoint.store.retention import Keep
from kempner.integrations.trainer.outputs import Outputs
from kempner.integrations.trainer.place import DataPlace, Place
from kempner.integrations.trainer.progress import Due, Progress, callback_states, held_by
from kempner.integrations.trainer.resumption import Before, Generators, bring_back
from kempner.run.process.exit_codes import ExitCode
from kempner.training.own_loop import OwnLoop
from kempner.training.session import Session
from kempner.training.vote.vote import VoteResult

_STATE = "trainer_state.json"


@dataclass
class StepEnd:
    """What is known of the end of the last step.

    A stop has cut off `evaluate` and `save`; `forced` is that the next save is kempner's own wish.
    """

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

        Raises `DataError`.
        """
        found = self._checkpoints.restore()
        self.loop = OwnLoop(self.session, self._checkpoints, found[0] if found else None)
        self.before: Before | None = None
        self.generators: Generators | None = None
        if found is None:
            return None
        step = found[0].step
        self.before = Before.read(found[1], step, self._trainer)
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
        say of a checkpoint that is none of kempner's.
        """
        grid = self.data.grid
        place = Place(epochs, micro_batches * grid.batch, grid.per_step, self.data.world.size)
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
        """Commit what can be, and part from the other ranks.

        Raises `SystemExit` if the run is to be started again.
        """
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

    def _progress(self) -> Progress:
        trainer, end = self._trainer, self.step_end
        earlier = self.before.progress if self.before else None
        seconds = 0.0 if end.start_time is None else time.time() - end.start_time
        return Progress(
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

    def _due(self) -> Due:
        """What the Trainer has yet to do after this step."""
        control, state, end = self._trainer.control, self._trainer.state, self.step_end
        left = control.should_training_stop or control.should_epoch_stop
        return Due(
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

    def _say_what_changed(self, place: Place) -> None:
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
