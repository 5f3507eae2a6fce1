"""Where Lightning's `fit` stands, and how it goes on: what its own checkpoint leaves out.

A batch of Lightning's is followed by a tail: validation, what is judged by it, the schedulers that
wait for it, and after the last batch the end of the epoch. Lightning counts a batch as done before
its tail. So a checkpoint is made between the two, where all counters agree, and says that the tail
is due; a resume begins with the tail.

Written against the loops of Lightning 2.5 and 2.6, whose attributes are not public.

What a Lightning module has logged so far, which Lightning's checkpoints leave out.

The mean of an epoch, early stopping and plateau schedulers are judged by it.

The files of the user's own `ModelCheckpoint`s, from one start of a run to the next.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.utilities.data import _set_sampler_epoch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loops.loop import _Loop
from lightning.pytorch.trainer.connectors.data_connector import _parse_num_batches
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from lightning.pytorch.trainer.states import RunningStage
from torch import Tensor
from torchmetrics import Metric

from kempner.data.serve.draws import seed_all
from kempner.data.serve.sampler import ResumableDataLoader
from kempner.integrations.lightning_data import HeldLoader, hold
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import MismatchError
from kempner.run.process.retry import describe
from kempner.training.compute.seeds import seed_for, set_rng

_METADATA = (
    "fx",
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "enable_graph",
    "add_dataloader_idx",
    "dataloader_idx",
    "metric_attribute",
)
_SHOWN = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")


def saved_metrics(trainer: Trainer) -> dict[str, Any]:
    """All of it, on this rank: numbers, strings and tensors."""
    connector = trainer._logger_connector
    return {
        "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
        "first_batch": connector._first_loop_iter,
        "hook": connector._current_fx,
        "logged": [_of_logged(key, entry) for key, entry in _results(trainer).items()],
        "metrics": {name: _of_metric(metric) for name, metric in _metrics(trainer).items()},
    }


def restore_metrics(trainer: Trainer, saved: Mapping[str, Any] | None, same_world: bool) -> None:
    """Have the trainer know again what was logged.

    What each rank has summed up by itself comes back to as many ranks only.
    """
    if saved is None:
        return
    connector, device = trainer._logger_connector, trainer.strategy.root_device
    for name in _SHOWN:
        getattr(connector, name).update(_to(saved["shown"][name], device))
    if not same_world:
        return
    connector._first_loop_iter, connector._current_fx = saved["first_batch"], saved["hook"]
    metrics = _metrics(trainer)
    for name, state in saved["metrics"].items():
        if name in metrics:
            _fill(metrics[name], state, device)
    for logged in saved["logged"]:
        entry = _new_entry(trainer, logged)
        if entry is not None:
            _results(trainer)[logged["key"]] = entry


def _results(trainer: Trainer) -> dict[str, _ResultMetric]:
    return trainer.fit_loop.epoch_loop._results


def _metrics(trainer: Trainer) -> dict[str, Metric]:
    modules = trainer.lightning_module.named_modules()
    return {name: module for name, module in modules if isinstance(module, Metric)}


def _of_metric(metric: Metric) -> dict[str, Any]:
    return {
        "values": {name: getattr(metric, name) for name in metric._defaults},
        "updates": metric._update_count,
    }


def _fill(metric: Metric, state: Mapping[str, Any], device: torch.device) -> None:
    for name, value in state["values"].items():
        setattr(metric, name, _to(value, device))
    metric._update_count, metric._computed = state["updates"], None


def _of_logged(key: str, entry: _ResultMetric) -> dict[str, Any]:
    meta, last = entry.meta, entry._forward_cache
    return {
        "key": key,
        "meta": {name: getattr(meta, name) for name in _METADATA},
        "reduce": meta.reduce_fx.__name__,
        "sync": [meta.sync.should, meta.sync.rank_zero_only],
        "reset": entry.has_reset,
        "last": last if isinstance(last, Tensor) else None,
        "sum": _of_metric(entry) if entry.is_tensor else None,
    }


def _new_entry(trainer: Trainer, logged: Mapping[str, Any]) -> _ResultMetric | None:
    """As the module's next `log` of the same name would find it; None for a metric that is gone."""
    device = trainer.strategy.root_device
    meta = _Metadata(**logged["meta"], reduce_fx=logged["reduce"])
    should, rank_zero_only = logged["sync"]
    meta.sync = _Sync(trainer.strategy.reduce, should, rank_zero_only)
    entry = _ResultMetric(meta, is_tensor=logged["sum"] is not None)
    if logged["sum"] is not None:
        _fill(entry, logged["sum"], device)
    elif (metric := _metrics(trainer).get(meta.metric_attribute or "")) is not None:
        entry.value = metric
        entry._update_count = metric._update_count
    else:
        return None
    entry.has_reset, entry._forward_cache = logged["reset"], _to(logged["last"], device)
    return entry.to(device)


def _to(value: Any, device: torch.device) -> Any:
    """The same with its tensors on `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return value


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


BATCH, TAIL, NEXT = 0, 1, 2
"""What draws random numbers: a batch, its tail, and what follows up to the next batch."""


class FitProgress:
    """Drives the loops of one `trainer.fit`, from the beginning or from a checkpoint.

    `saved` is what `state` gave to that checkpoint; an empty mapping for one of an earlier kempner,
    None for a new run. `after_batch` is called between each batch and its tail, and told whether an
    evaluation comes then; `when_complete` where a checkpoint has nothing left to do.
    """

    def __init__(
        self,
        trainer: Trainer,
        place: tuple[int, int],
        seed: int,
        saved: Mapping[str, Any] | None,
        files: ModelFiles,
    ) -> None:
        self._trainer, self._saved, self._files = trainer, saved, files
        self._rank, self._world = place
        self.seed = seed
        self._undo = contextlib.ExitStack()
        self._lightning_tail: Callable[[Any], None] = trainer.fit_loop.epoch_loop.on_advance_end

    def attach(
        self, after_batch: Callable[[bool], None], when_complete: Callable[[], None]
    ) -> None:
        """Have Lightning call these, and take its training data from loaders that hold a place."""
        fit, connector = self._trainer.fit_loop, self._trainer._data_connector

        def on_advance_end(fetcher: Any) -> None:
            after_batch(self._evaluation_due(fetcher))
            self._make_tail(fetcher)

        self._replace(fit.epoch_loop, "on_advance_end", on_advance_end)
        self._replace(fit, "_load_combined_loader_states", self._load_loaders)
        prepare = partial(self._prepare_loader, connector._prepare_dataloader)
        self._replace(connector, "_prepare_dataloader", prepare)
        if self._saved is not None:
            self._replace(fit, "run", partial(self._go_on, when_complete))
            self._trainer.num_sanity_val_steps = 0  # it was made when the run began

    def detach(self) -> None:
        """Leave the trainer as it was."""
        self._undo.close()

    def _replace(self, owner: Any, name: str, mine: Any) -> None:
        setattr(owner, name, mine)
        self._undo.callback(vars(owner).pop, name, None)

    def seed_generators(self, stage: int) -> None:
        """Seed what draws random numbers in this stage of the current batch."""
        place = self.seed, self._trainer.fit_loop.total_batch_idx, stage, self._rank
        set_rng(*place)  # CUDA's, too; and it knows that this is no seed of the program's
        seed_all(seed_for(*place))

    def state(self, tail_due: bool) -> dict[str, Any]:
        """What a checkpoint must hold beside Lightning's own, on this rank."""
        trainer, loops = self._trainer, self._trainer.fit_loop
        return {
            "world": self._world,
            "seed": self.seed,
            "tail_due": tail_due,
            "epoch_whole": loops.epoch_loop._num_ready_batches_reached(),
            "should_stop": trainer.should_stop,
            "accumulate": trainer.accumulate_grad_batches,
            "loaders": [loader.state_dict() for loader in self._loaders()],
            "metrics": saved_metrics(trainer),
            "model_files": self._files.state(),
        }

    def is_last_step(self) -> bool:
        """Whether training ends with this step, whatever its validation says."""
        fit, trainer = self._trainer.fit_loop, self._trainer
        if trainer.max_steps not in (-1, None) and trainer.global_step >= trainer.max_steps:
            return True
        epochs = _epochs_done(fit) + 1
        last_epoch = fit.max_epochs not in (-1, None) and epochs >= (fit.max_epochs or 0)
        return last_epoch and fit.epoch_loop._num_ready_batches_reached()

    def begin_epoch(self) -> None:
        """Have the loader begin the epoch that Lightning counts, and Lightning know its length."""
        loaders = self._loaders()
        if len(loaders) == 1 and (loader := _resumable(loaders[0])) is not None:
            loader.set_epoch(_epochs_done(self._trainer.fit_loop))
            self._set_length(loader.left())

    def _evaluation_due(self, fetcher: Any) -> bool:
        if (
            getattr(self._trainer, "_val_check_time_interval", None) is not None
        ):  # each rank has its own clock
            return False
        return self._trainer.fit_loop.epoch_loop._should_check_val_fx(fetcher)

    def _make_tail(self, fetcher: Any) -> None:
        self.seed_generators(TAIL)
        self._lightning_tail(fetcher)
        self.seed_generators(NEXT)

    def _loaders(self) -> Sequence[Any]:
        combined = self._trainer.fit_loop._combined_loader
        return combined.flattened if combined is not None else []

    def _prepare_loader(
        self, lightnings: Callable[..., Any], loader: Any, shuffle: bool, mode: RunningStage
    ) -> Any:
        """In the place of Lightning's own, which injects its `DistributedSampler`."""
        if mode != RunningStage.TRAINING:
            return lightnings(loader, shuffle=shuffle, mode=mode)
        inject = partial(lightnings, shuffle=shuffle, mode=mode)
        place = self._rank, self._world
        return hold(loader, self.seed, place, inject, self._fetched_ahead)

    def _fetched_ahead(self) -> int:
        return len(getattr(self._trainer.fit_loop._data_fetcher, "batches", ()))

    def _load_loaders(self) -> None:
        """In the place of Lightning's own: before it makes an iterator."""
        if self._saved is not None and not self._at_end_of_epoch:
            self._load_places()

    @property
    def _at_end_of_epoch(self) -> bool:
        """Whether the epoch that the checkpoint stands in has no batch left."""
        fit = self._trainer.fit_loop
        return fit.epoch_loop.batch_progress.is_last_batch or not _epoch_is_open(fit)

    def _load_places(self) -> None:
        fit, loaders = self._trainer.fit_loop, self._loaders()
        # Without any the checkpoint is of an earlier kempner: then Lightning's own are there.
        states = (self._saved or {}).get("loaders", fit._combined_loader_states_to_load)
        for loader in loaders:  # or a sampler would draw the order of the first epoch
            _set_sampler_epoch(loader, _epochs_done(fit))
        fit._combined_loader_states_to_load = []
        if not self._saved and not states:  # an earlier kempner held no place of these
            for loader in filter(_resumable, loaders):
                loader.set_epoch(_epochs_done(fit))
                loader.skip(fit.epoch_loop.batch_progress.current.ready)
            return
        if len(states) != len(loaders):
            raise MismatchError(
                f"the checkpoint has places in {len(states)} training loaders, and trainer.fit got "
                f"{len(loaders)}: give it the same ones, or begin a new run"
            )
        for loader, state in zip(loaders, states, strict=True):
            self._refuse_other_world(loader)
            loader.load_state_dict(state)

    def _refuse_other_world(self, loader: Any) -> None:
        was = (self._saved or {}).get("world", self._world)
        if was != self._world and not _fits_any_world(loader):
            raise MismatchError(
                f"the checkpoint is of {was} ranks, and this run has {self._world}: the place in "
                f"the data of {type(loader).__name__} is one for each rank; start as many ranks, "
                "or give trainer.fit a DataLoader of a data set with a length and torch's samplers"
            )

    def _go_on(self, when_complete: Callable[[], None]) -> None:
        """In the place of Lightning's `fit_loop.run`: begins within an epoch, or with its end."""
        fit, saved = self._trainer.fit_loop, self._saved or {}
        tail_due = saved["tail_due"] if saved else self._complete_old_batch()
        self._restore()
        if not tail_due and fit.done:
            restore_metrics(self._trainer, saved.get("metrics"), same_world=False)
            when_complete()
            return
        if not tail_due and not saved.get("epoch_whole", True):
            _open_epoch_again(fit)
        fit.setup_data()
        if self._at_end_of_epoch:
            self._load_places()
        if _epoch_is_open(fit):
            self._begin_within_epoch(tail_due)
        else:
            _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
            fit._resuming_from_checkpoint = False
        self._run_rest(first=tail_due)

    def _run_rest(self, first: bool) -> None:
        """`fit_loop.run` of Lightning, but that the epoch in which it begins has its end made."""
        fit = self._trainer.fit_loop
        fit.reset()
        fit.on_run_start()
        while first or not fit.done:
            first = False
            try:
                fit.on_advance_start()
                fit.advance()
                fit.on_advance_end()
            except StopIteration:
                break
            finally:
                fit.on_iteration_done()
        fit._restarting = False
        fit.on_run_end()

    def _begin_within_epoch(self, tail_due: bool) -> None:
        """Once the loops are set up, make the tail that is due, and go on with the next batch."""
        fit, loop = self._trainer.fit_loop, self._trainer.fit_loop.epoch_loop
        self._count_batches_of_this_world()
        begin = loop.on_run_start

        def on_run_start(fetcher: Any) -> None:
            del loop.on_run_start  # for this once
            begin(fetcher)
            _Loop.restarting.fset(fit, False)  # type: ignore[attr-defined]
            metrics, was = (self._saved or {}).get("metrics"), (self._saved or {}).get("world")
            restore_metrics(self._trainer, metrics, same_world=was == self._world)
            if tail_due:
                self._make_tail(fetcher)
                loop.on_iteration_done()
            else:
                self.seed_generators(NEXT)

        self._replace(loop, "on_run_start", on_run_start)

    def _complete_old_batch(self) -> bool:
        """A checkpoint of an earlier kempner was made before its batch was counted as complete."""
        progress = self._trainer.fit_loop.epoch_loop.batch_progress
        tail_due = bool(progress.total.completed < progress.total.ready)
        if tail_due:
            progress.increment_completed()
        return tail_due

    def _restore(self) -> None:
        trainer, saved = self._trainer, self._saved or {}
        trainer.should_stop = saved.get("should_stop", False)
        if saved.get("world") == self._world:
            trainer.accumulate_grad_batches = saved["accumulate"]
        self._files.restore(saved.get("model_files", {}))

    def _count_batches_of_this_world(self) -> None:
        """The batches of this epoch that are done, as if they had all been made by these ranks."""
        fit, loaders = self._trainer.fit_loop, self._loaders()
        other_world = (self._saved or {}).get("world", self._world) != self._world
        loader = _resumable(loaders[0]) if len(loaders) == 1 else None
        if self._at_end_of_epoch:
            if other_world:
                self._set_counts(int(fit.max_batches))
            elif loader is not None:  # this epoch may have been a batch shorter than others
                self._limit(fit.epoch_loop.batch_progress.current.ready)
        elif loader is not None:
            left = loader.left()
            if other_world:
                self._set_counts(max(0, len(loader) - left))
            self._set_length(fit.epoch_loop.batch_progress.current.ready + left)

    def _set_counts(self, done: int) -> None:
        current = self._trainer.fit_loop.epoch_loop.batch_progress.current
        for name in vars(current):
            setattr(current, name, done)

    def _set_length(self, batches: int) -> None:
        """Of this epoch: another one than `len(loader)` where the ranks share it unevenly."""
        limits = self._trainer.limit_train_batches
        self._limit(_parse_num_batches(RunningStage.TRAINING, batches, limits))

    def _limit(self, limit: int | float) -> None:
        trainer, fit = self._trainer, self._trainer.fit_loop
        if limit == fit.max_batches or fit._combined_loader is None:
            return
        fit._combined_loader.limits = [limit]
        fit.max_batches = limit
        if fit._data_fetcher is not None:
            fit._data_fetcher.length = int(limit)
        if isinstance(trainer.val_check_interval, float):
            trainer.val_check_batch = max(1, int(limit * trainer.val_check_interval))


def _epochs_done(fit: Any) -> int:
    done: int = fit.epoch_progress.current.processed
    return done


def _epoch_is_open(fit: Any) -> bool:
    current = fit.epoch_progress.current
    return bool(current.ready != current.processed)


def _open_epoch_again(fit: Any) -> None:
    """Lightning counts the epoch in which training ends as done; with more steps it is not."""
    for progress in (fit.epoch_progress.total, fit.epoch_progress.current):
        progress.processed -= 1
        progress.completed -= 1
    _Loop.restarting.fset(fit, True)  # type: ignore[attr-defined]


def _resumable(loader: Any) -> HeldLoader | ResumableDataLoader[Any] | None:
    """The loader if kempner draws its order, and it has epochs."""
    if isinstance(loader, HeldLoader):
        return loader
    if isinstance(loader, ResumableDataLoader) and not loader.batch_sampler.infinite:  # type: ignore[union-attr]
        return loader
    return None


def _fits_any_world(loader: Any) -> bool:
    if isinstance(loader, HeldLoader):
        return loader.fits_any_world
    return isinstance(loader, ResumableDataLoader)
