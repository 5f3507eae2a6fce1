"""State that Lightning's own checkpoint leaves out: logged metrics, and the files of
`ModelCheckpoint`.

Means over an epoch, early stopping and plateau schedulers depend on the metrics logged so far."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

from kempner.run.output.logs import logger
from kempner.run.process.retry import describe

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
    """The logged metrics on this rank, as numbers, strings and tensors."""
    connector = trainer._logger_connector
    return {
        "shown": {name: dict(getattr(connector, name)) for name in _SHOWN},
        "first_batch": connector._first_loop_iter,
        "hook": connector._current_fx,
        "logged": [_of_logged(key, entry) for key, entry in _results(trainer).items()],
        "metrics": {name: _of_metric(metric) for name, metric in _metrics(trainer).items()},
    }


def restore_metrics(trainer: Trainer, saved: Mapping[str, Any] | None, same_world: bool) -> None:
    """Restore the logged metrics. Partial sums of each rank are restored only for the same number
    of ranks."""
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
    """The restored entry of a logged name; None if its metric no longer exists."""
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
    """Move all tensors in a nested value to `device`."""
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, list):
        return [_to(item, device) for item in value]
    if isinstance(value, dict):
        return {name: _to(item, device) for name, item in value.items()}
    return value


_HELD = ("_last_global_step_saved", "_last_checkpoint_saved", "_defer_save_until_validation")
"""Attributes that affect the next file, and that Lightning does not save."""


class ModelFiles:
    """Makes each `ModelCheckpoint` continue as if the run had not been interrupted.

    Repeated steps write their files again under the same names. A checkpoint may not know the
    newest files, so `record` is a file with the names that this run has written; Lightning would
    take such files for another run's, and write `...-v1.ckpt` beside them."""

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
        """Hook into the saves of all callbacks; `left_over` are the names in the record."""
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
        self._undo.close()

    def recorded(self) -> set[str]:
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

    def restore_folders(self, states: Mapping[str, Any]) -> None:
        """Restore the folders that Lightning chose itself; it would choose new ones at each
        start."""
        for callback in self._callbacks:
            folder = states.get(callback.state_key, {}).get("dirpath")
            if folder and callback.state_key in self._without_folder:
                callback.dirpath = folder

    def state(self) -> dict[str, Any]:
        """The state of the callbacks that Lightning does not save."""
        return {c.state_key: {name: vars(c).get(name) for name in _HELD} for c in self._callbacks}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Restore that state, after Lightning has restored its own."""
        for callback in self._callbacks:
            vars(callback).update(state.get(callback.state_key, {}))
            known = {*callback.best_k_models, callback.best_model_path, callback.last_model_path}
            self._left_over -= known
