"""transformers' `Trainer`, and trainers that derive from it (TRL's), under kempner.

    from kempner.integrations.transformers import surviving

    trainer = surviving(Trainer)(model=model, args=arguments, train_dataset=samples)
    trainer.train()

The Trainer writes its own checkpoints, and kempner commits them in the run directory;
`checkpoint-<step>` in `output_dir` links to them. Written against transformers 5.4 to 5.23.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

from torch import nn

try:
    from transformers import (
        Trainer,
        TrainerCallback,
        TrainerControl,
        TrainerState,
        TrainingArguments,
    )
    from transformers import __version__ as transformers_version
    from transformers.trainer_utils import has_length
except ModuleNotFoundError as error:
    from kempner.integrations.extras import without_extra

    raise without_extra(error, "transformers") from None

from kempner.integrations.transformers_trainer.loop import StepEnd, TrainerRun, refuse_inexact
from kempner.integrations.transformers_trainer.state import restore_callbacks
from kempner.run.control.rehearsal import place_of
from kempner.run.process.exit_codes import UsageError
from kempner.training.session import RunEntry


@cache
def surviving(trainer: type[Trainer]) -> type[Trainer]:
    """A subclass of `Surviving` and `trainer`, with the arguments of `trainer`."""
    return type(f"Surviving{trainer.__name__}", (Surviving, trainer), {})


class Surviving(Trainer):
    """A mixin, to be named before the Trainer class: `class Mine(Surviving, SFTTrainer)`.

    `train` resumes from the newest checkpoint that verifies; `resume_from_checkpoint` counts only
    if the run has none. All ranks vote in each step, and stop after the same one; then the
    checkpoint is committed and `train` raises `SystemExit` with 75. `save_steps`, `save_strategy`
    and `save_total_limit` apply as usual; the last step is saved, too. Settings that cannot be
    resumed exactly are refused (`LIMITS`). A hyperparameter search is left to the Trainer.

    The run belongs to `output_dir`: another `output_dir` is another run. The class attribute
    `run_dir` is the run directory, if it is not to be the supervisor's or `runs/<script>`."""

    run_dir: str | Path | None = None
    ignore_keys_for_eval: list[str] | None = None
    _kempner: TrainerRun | None = None

    def train(
        self,
        resume_from_checkpoint: str | bool | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
        **options: Any,
    ) -> Any:
        if trial is not None:
            return super().train(resume_from_checkpoint, trial, ignore_keys_for_eval, **options)
        entry = RunEntry(
            "train", self.run_dir, output_dir=None if self.run_dir else str(self.args.output_dir)
        )
        with entry.guard():
            _check_version()
            if self._kempner is not None:
                raise UsageError("train() was called before; make another trainer to train again")
            refuse_inexact(self)
            session = entry.meet(self.args.device, _pace(self.args), _facts(self))
            self.args.output_dir = str(place_of(str(self.args.output_dir)))
            run = TrainerRun(self, session)
            found = run.restore()
        self._kempner, self.ignore_keys_for_eval = run, ignore_keys_for_eval
        self.add_callback(_Votes(run))
        try:
            if found is None and resume_from_checkpoint is True:
                resume_from_checkpoint = None
            first = resume_from_checkpoint if found is None else str(found)
            return super().train(first, None, ignore_keys_for_eval, **options)
        finally:
            self.remove_callback(_Votes)
            session.give_back(run.code)

    # ---- place in the data

    def get_train_dataloader(self) -> Any:
        loader = super().get_train_dataloader()
        if self._kempner is not None:
            self._kempner.data.take(loader)
        return loader

    def set_initial_training_values(self, *args: Any, **options: Any) -> Any:
        values = super().set_initial_training_values(*args, **options)
        return values if self._kempner is None else self._kempner.plan(values)

    def _init_training_state(self, *args: Any, **options: Any) -> Any:
        place = super()._init_training_state(*args, **options)
        run = self._kempner
        if run is None:
            return place
        if run.before is not None and run.before.progress is not None:
            restore_callbacks(self, run.before.progress.callbacks)
        # Last, after those that the Trainer has restored, so that it sees their decisions.
        self.remove_callback(_Votes)
        self.add_callback(_Votes(run))
        return run.begin(*place)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self._kempner is None or self._kempner.generators is None:
            super()._load_rng_state(checkpoint)
        else:
            self._kempner.load_generators()

    def load_generators(self, folder: str) -> None:
        """Load the random generators with the Trainer's own method, from its own folder."""
        super()._load_rng_state(folder)

    def _run_epoch(self, *args: Any, **options: Any) -> None:
        """Run an epoch, or the rest of it; not if the due work has ended the training."""
        run = self._kempner
        if run is None:
            super()._run_epoch(*args, **options)  # type: ignore[no-untyped-call]
        elif not self.control.should_training_stop and options["epoch"] != run.data.left_epoch:
            leg = run.data.begin_epoch(options["epoch"])
            counted = {"steps_in_epoch": leg.micro_batches}
            counted |= {"num_update_steps_per_epoch": leg.updates}
            super()._run_epoch(*args, **options | counted)  # type: ignore[no-untyped-call]

    # ---- evaluation, saves and the end

    def _maybe_log_save_evaluate(
        self,
        tr_loss: Any,
        grad_norm: Any,
        model: nn.Module,
        trial: Any,
        epoch: Any,
        ignore_keys_for_eval: Any,
        start_time: float,
        learning_rate: float | None = None,
    ) -> None:
        if self._kempner is not None:
            end = self._kempner.step_end
            end.grad_norm, end.learning_rate, end.start_time = grad_norm, learning_rate, start_time
        more = (trial, epoch, ignore_keys_for_eval, start_time)
        super()._maybe_log_save_evaluate(
            tr_loss, grad_norm, model, *more, learning_rate=learning_rate
        )

    def evaluate(self, *args: Any, **options: Any) -> Any:
        if self._kempner is None:
            return super().evaluate(*args, **options)
        with self._kempner.session.evaluation():
            return super().evaluate(*args, **options)

    def _evaluate(self, trial: Any, ignore_keys_for_eval: Any, skip_scheduler: bool = False) -> Any:
        """Skip `eval_on_start` (the only caller with `skip_scheduler`) in a resumed run."""
        if skip_scheduler and self._kempner is not None and self._kempner.before is not None:
            return {}
        return super()._evaluate(trial, ignore_keys_for_eval, skip_scheduler)

    def _save_checkpoint(self, model: nn.Module, trial: Any, *more: Any) -> None:
        """Write and commit a checkpoint; after a stop, leave."""
        run = self._kempner
        if run is None or trial is not None:
            super()._save_checkpoint(model, trial, *more)
            return
        run.save()
        if run.agreed.stop:
            run.leave()

    def write_own_checkpoint(self) -> None:
        super()._save_checkpoint(self.model_wrapped, None)

    def _get_output_dir(self, trial: Any) -> str:
        if self._kempner is not None and self._kempner.writing_to is not None:
            return str(self._kempner.writing_to)
        return str(super()._get_output_dir(trial))

    def _finalize_training(self, trial: Any, num_train_samples: Any, start_time: float) -> Any:
        """Commit the last step before the best model is loaded."""
        run = self._kempner
        if run is not None:
            run.leave()
            if run.before is not None and run.before.progress is not None:
                start_time -= run.before.progress.seconds
        return super()._finalize_training(  # type: ignore[no-untyped-call]
            trial, num_train_samples, start_time
        )


class _Votes(TrainerCallback):
    """Votes in every step, and has the Trainer save and stop as the ranks agree."""

    def __init__(self, run: TrainerRun) -> None:
        self._run = run

    def on_train_begin(self, *_: Any, **__: Any) -> Any:
        return self._run.begin_training()

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self._run.step_end = StepEnd()
        self._run.loop.begin_step()

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any
    ) -> None:
        run, end, wanted = self._run, self._run.step_end, control.should_save
        run.data.step()
        agreed = run.agreed = run.loop.end_step(state.global_step)
        if agreed.stop:
            end.evaluate, end.save = control.should_evaluate, wanted
            control.should_evaluate, control.should_save = False, True
        else:
            control.should_save = run.loop.save_is_due(agreed, wanted)
        end.forced = bool(agreed.stop) or (control.should_save and not wanted)

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self._run.step_end.ends_epoch = True


def _check_version() -> None:
    if not hasattr(Trainer, "_run_epoch"):
        raise UsageError(
            f"surviving(...): transformers {transformers_version} is too old; install 5.4 or newer"
        )


def _pace(args: TrainingArguments) -> dict[str, object]:
    """Arguments that must be the same on all ranks, so that they stop and save together."""
    names = ("max_steps", "num_train_epochs", "save_strategy", "save_steps", "seed", "data_seed")
    return {name: getattr(args, name) for name in names}


def _facts(trainer: Trainer) -> dict[str, object]:
    """Facts that determine the result; of the run's length only `max_steps`."""
    args, samples = trainer.args, trainer.train_dataset
    optimizer = {"name": str(args.optim), "lr": args.learning_rate, "decay": args.weight_decay}
    facts: dict[str, object] = {
        "model": type(trainer.model).__name__,
        "optimizer": optimizer,
        "schedule": str(args.lr_scheduler_type),
        "seed": args.seed,
        "data_seed": args.data_seed,
    }
    if args.max_steps > 0:
        facts["steps"] = args.max_steps
    return facts | ({"samples": len(samples)} if has_length(samples) else {})
