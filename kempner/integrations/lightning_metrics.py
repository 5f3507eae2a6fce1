"""What a Lightning module has logged so far, which Lightning's checkpoints leave out.

The mean of an epoch, early stopping and plateau schedulers are judged by it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.connectors.logger_connector.result import (
    _Metadata,
    _ResultMetric,
    _Sync,
)
from torch import Tensor
from torchmetrics import Metric

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
