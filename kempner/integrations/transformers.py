"""transformers' `Trainer`, and whatever derives from it (TRL's `SFTTrainer`), under kempner.

    from kempner.integrations.transformers import surviving

    trainer = surviving(Trainer)(model=model, args=arguments, train_dataset=samples)
    trainer.train()

The Trainer writes its own checkpoints, and kempner commits them: they are below the run directory,
and `checkpoint-<step>` in `output_dir` links to them. Written against transformers 4.56 to 5.23.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

from torch import nn
from transformers import (
    Trainer,
    TrainerCallback,
    TrainerControl,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from kempner.checkpoint.folders import FolderCheckpoints
from kempner.checkpoint.store.retention import Keep
from kempner.run.control.protocol import Phase
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.training.own_loop import OwnLoop
from kempner.training.session import Entry, Session
from kempner.training.vote.vote import VoteResult

_STATE = "trainer_state.json"


@cache
def surviving(trainer: type[Trainer]) -> type[Trainer]:
    """The class `trainer` with `Surviving` before it; what it takes stays the same."""
    return type(f"Surviving{trainer.__name__}", (Surviving, trainer), {})


class Surviving(Trainer):
    """A mixin, to be named before the Trainer class: `class Mine(Surviving, SFTTrainer)`.

    `train` goes on from the newest checkpoint that verifies, whatever `resume_from_checkpoint` says
    (which counts for a run that has none). All ranks vote in each step, and stop after the same
    one; then the checkpoint is committed and `train` raises `SystemExit` with 75. `save_steps`,
    `save_strategy` and `save_total_limit` hold as ever; the last step is saved, too.

    `run_dir` is a class attribute: the run directory, if it is not the supervisor's.
    """

    run_dir: str | Path | None = None
    _kempner: _Run | None = None

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: Any, **options: Any
    ) -> Any:
        entry = Entry("train", self.run_dir)
        with entry.guard():
            if self._kempner is not None:
                raise UsageError("train() was called before; make another trainer to train again")
            session = entry.meet(self.args.device, _facts(self.args))
            run = _Run(self, session)
            link = run.restore()
        self._kempner = run
        code: ExitCode | None = None
        callback = _Votes(run)
        self.add_callback(callback)
        try:
            if link is None and resume_from_checkpoint is True:
                resume_from_checkpoint = None
            first = resume_from_checkpoint if link is None else str(link)
            result = super().train(first, *args, **options)
            code = run.leave()
            return result
        except SystemExit:
            code = ExitCode.STOPPED if run.agreed.stop else None
            raise
        finally:
            self.remove_callback(callback)
            session.give_back(code)

    def evaluate(self, *args: Any, **options: Any) -> Any:
        if self._kempner is None:
            return super().evaluate(*args, **options)
        with self._kempner.session.progress.during(Phase.EVAL):
            return super().evaluate(*args, **options)

    def _save_checkpoint(self, model: nn.Module, trial: Any, *more: Any) -> None:
        """Have the checkpoint committed; after a stop nothing follows it."""
        save = partial(super()._save_checkpoint, model, trial, *more)
        if self._kempner is None or trial is not None:
            save()
            return
        self._kempner.save(save)
        if self._kempner.agreed.stop:
            raise SystemExit(int(self._kempner.leave()))

    def write_own_checkpoint(self) -> None:
        """As the Trainer does, where it has not asked for one itself."""
        super()._save_checkpoint(self.model_wrapped, None)

    def _get_output_dir(self, trial: Any) -> str:
        if self._kempner is not None and self._kempner.writing_to is not None:
            return str(self._kempner.writing_to)
        return str(super()._get_output_dir(trial))


class _Run:
    """The run of one trainer: its loop, and where its checkpoints are."""

    def __init__(self, trainer: Surviving, session: Session) -> None:
        self._trainer, self.session = trainer, session
        self.agreed = VoteResult()
        """What the ranks have agreed on in their last vote."""
        self.writing_to: Path | None = None
        """The folder that becomes the next checkpoint, while it is written."""
        self._write: Callable[[], None] | None = None
        seed = trainer.args.data_seed if trainer.args.data_seed is not None else trainer.args.seed
        context = session.context(optimizer=None, seed=seed)
        self._checkpoints = FolderCheckpoints(
            context, self._write_into, keep=self._keep(), durations=session.durations
        )

    def restore(self) -> Path | None:
        """The link to the newest checkpoint that verifies, or None."""
        found = self._checkpoints.restore()
        self.loop = OwnLoop(self.session, self._checkpoints, found[0] if found else None)
        if found is None:
            return None
        self._link(found[0].step)
        return found[1] / f"{PREFIX_CHECKPOINT_DIR}-{found[0].step}"

    def save(self, write: Callable[[], None]) -> None:
        """Have `write` write a checkpoint, and commit it; once for a step."""
        step = self.loop.train_state.step
        if self._checkpoints.committed_step == step:
            return
        self._write = write
        self._checkpoints.keep_only(self._keep())
        self.loop.save(self.agreed)
        if self._checkpoints.committed_step == step:
            self._link(step)

    def leave(self) -> ExitCode:
        """Commit what can be, and part from the other ranks."""
        code = self.loop.leave(self.agreed)
        self._remove_old_links()
        return code

    def _write_into(self, path: Path) -> None:
        limit, self._trainer.args.save_total_limit = self._trainer.args.save_total_limit, None
        self.writing_to = path
        try:
            (self._write or self._trainer.write_own_checkpoint)()
            self._name_best(path)
        finally:
            self.writing_to, self._trainer.args.save_total_limit = None, limit

    def _name_best(self, path: Path) -> None:
        """The Trainer's state names the best checkpoint by its path, which is a link's here."""
        state = self._trainer.state
        if (best := _best_step(state)) is None:
            return
        link = str(self._outputs / f"{PREFIX_CHECKPOINT_DIR}-{best}")
        if state.best_model_checkpoint != link:
            state.best_model_checkpoint = link
            if self._trainer.args.should_save:
                folder = path / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
                state.save_to_json(str(folder / _STATE))

    def _keep(self) -> Keep:
        """As many as `save_total_limit` says, two at least, and the best one."""
        limit = self._trainer.args.save_total_limit
        best = _best_step(self._trainer.state)
        pinned = frozenset() if best is None else frozenset([best])
        return Keep(last=sys.maxsize if limit is None else max(2, limit), pinned=pinned)

    @property
    def _outputs(self) -> Path:
        return Path(str(self._trainer.args.output_dir))

    def _link(self, step: int) -> None:
        """Have `output_dir/checkpoint-<step>` lead to a commit, where people look for it."""
        if self.session.ranks.world.rank != 0:
            return
        outputs = self._outputs
        name = f"{PREFIX_CHECKPOINT_DIR}-{step}"
        target = self._checkpoints.path(step) / name
        try:
            outputs.mkdir(parents=True, exist_ok=True)
            with suppress(FileExistsError):
                (outputs / name).symlink_to(os.path.relpath(target, outputs))
        except OSError as error:
            logger().warning("cannot link to the checkpoint", step=step, error=str(error))

    def _remove_old_links(self) -> None:
        """Those to checkpoints that retention has deleted."""
        if self.session.ranks.world.rank == 0:
            for link in self._outputs.glob(f"{PREFIX_CHECKPOINT_DIR}-*"):
                if link.is_symlink() and not link.exists():
                    link.unlink(missing_ok=True)


class _Votes(TrainerCallback):
    """Votes in every step, and has the Trainer save and stop as the ranks agree."""

    def __init__(self, run: _Run) -> None:
        self._run = run

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._run.loop.begin()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        self._run.loop.begin_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        loop, last = self._run.loop, state.global_step >= state.max_steps
        agreed = self._run.agreed = loop.end_step(state.global_step)
        if agreed.stop:
            control.should_save, control.should_evaluate = True, False
            control.should_training_stop = True
        else:
            control.should_save = loop.save_is_due(agreed, control.should_save or last)


def _best_step(state: Any) -> int | None:
    best: int | None = getattr(state, "best_global_step", None)
    return best or None


def _facts(args: TrainingArguments) -> dict[str, object]:
    """What must be the same on all ranks, or they would not stop or save together."""
    names = ("max_steps", "num_train_epochs", "save_strategy", "save_steps", "seed", "data_seed")
    return {name: getattr(args, name) for name in names}
