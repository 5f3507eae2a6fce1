"""Batch after batch of any loader, epoch after epoch, from a place that a checkpoint holds.

    supply = supply_of(loader, seed, (rank, ranks))
    supply.load_state_dict(...)   # where there is a checkpoint
    batch = supply.take()

A map-style `DataLoader` is read by a plan (`sampling_order.py`): its place counts the batches that
the loop has taken, however far any number of workers have read ahead. A stream is asked for its own
state.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any, TypeAlias

from torch.utils.data import DataLoader, IterableDataset, default_collate

from kempner.data.serve.sample_rng import (
    DrawnDataset,
    SampleRequest,
    is_pure,
    kept,
    key,
    seed_all,
    show_own_dataset,
)
from kempner.data.serve.sampler import ResumableDataLoader
from kempner.data.serve.sampling_order import Batch, ReadPlan, plan_of
from kempner.run.process.exit_codes import MismatchError, UsageError

_SHELLS = ("base_dataloader", "_dataloader")
"""Where a loader that wraps another has it: accelerate's, Fabric's."""

_KEPT_OPTIONS = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "multiprocessing_context"),
    *("prefetch_factor", "persistent_workers", "in_order"),
)

_NOT_HELD = (
    "give it a DataLoader of a data set with a length, torchdata's StatefulDataLoader, or a "
    "stream with state_dict and load_state_dict, such as Hugging Face's IterableDataset"
)


def supply_of(data: Any, seed: int, place: tuple[int, int]) -> Supply:
    """How `data` is read by the rank of `place`: (rank, number of ranks). Raises `UsageError`, in
    one sentence, for what has no place that can be found again."""
    loader = _inner(data)
    name = type(data).__name__
    if name == "DataLoaderDispatcher":
        raise UsageError(
            "survive(data=...): rank 0 reads for all ranks (dispatch_batches), and no rank knows "
            "the place of its own; prepare the loader with dispatch_batches=False"
        )
    mapped = isinstance(loader, DataLoader) and not isinstance(loader.dataset, IterableDataset)
    if mapped and not (_stateful(loader) and _stateful(loader.dataset)):
        return MappedLoader(data, plan_of(loader, seed, place))
    return StreamedLoader(data, _source(data, loader), seed, place[0])


class MappedLoader:
    """A map-style loader, read by a plan. `shared` is whether the place is the same on all ranks,
    and so one for any number of them; `facts` are what must be equal on all ranks."""

    def __init__(self, loader: Any, plan: ReadPlan) -> None:
        self.plan, self._ahead = plan, _NotingSampler(plan)
        inner = _inner(loader)
        self._batches: Iterator[Any] | None = None
        self._loader = _rebuilt(loader, DrawnDataset(inner.dataset), self._ahead)
        here = inner.num_workers == 0
        draws = not (is_pure(inner.dataset) and inner.collate_fn is default_collate)
        self._around = kept if here and draws else nullcontext
        self.shared, self.facts = plan.shared, plan.facts

    def take(self) -> tuple[Any, int]:
        """The next batch, the first of the next epoch after the last of this one; and its epoch,
        counted from 0. Raises `UsageError` if an epoch has none."""
        epoch = self.plan.epoch
        with self._around():
            batch = self._next()
        self.plan.place = self._ahead.read.popleft()
        return batch, epoch

    def _next(self) -> Any:
        for _ in range(2):
            if self._batches is None:
                self._batches = iter(self._loader)
            for batch in self._batches:
                return batch
            self._batches = None
        raise UsageError("survive(data=...): the loader yields no batch in a whole epoch")

    def state_dict(self) -> dict[str, Any]:
        return self.plan.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a place. Raises `MismatchError` if this data has no such place."""
        self.plan.load_state_dict(state)

    def close(self) -> None:
        self._batches = None


class _NotingSampler:
    """The sampler that a loader is given; it notes the place after each batch that it yields."""

    def __init__(self, plan: ReadPlan) -> None:
        self._plan = plan
        self.read: deque[Any] = deque()

    def __iter__(self) -> Iterator[list[SampleRequest]]:
        self.read.clear()
        batch: Batch
        for batch in self._plan.rest_of_epoch():
            self.read.append(batch.after)
            yield batch.items


class _NotingIndexSampler:
    """The same for a loader that makes no batches itself: one index, or one list of them."""

    def __init__(self, ahead: _NotingSampler, lists: bool) -> None:
        self._ahead, self._lists = ahead, lists

    def __iter__(self) -> Iterator[SampleRequest]:
        for items in self._ahead:
            indices = [item.index for item in items]
            yield SampleRequest(indices if self._lists else indices[0], items[0].seed)


class StreamedLoader:
    """A loader or data set that has a state of its own, which is this rank's."""

    shared = False

    def __init__(self, data: Any, source: Any, seed: int, rank: int) -> None:
        self._data, self._source, self._seed, self._rank = data, source, seed, rank
        self._workers = getattr(_inner(data), "num_workers", 0)
        self._epoch = self._count = self._of_epoch = 0
        self._skip = 0
        self._batches: Iterator[Any] | None = None
        self.facts: dict[str, object] = {"the kind of data": type(data).__name__}

    def take(self) -> tuple[Any, int]:
        with kept():
            batch = self._next()
        self._count += 1
        self._of_epoch += 1
        return batch, self._epoch

    def _next(self) -> Any:
        for _ in range(3):
            if self._batches is None:
                self._set_epoch()
                self._batches = iter(self._data)
                while self._skip and next(self._batches, self) is not self:
                    self._skip -= 1
            # Here: to begin draws, too, and does not happen at the same place in a resumed run.
            seed_all(key(self._seed, "stream", self._rank, self._count))
            for batch in self._batches:
                return batch
            self._batches = None
            self._epoch, self._of_epoch = self._epoch + bool(self._of_epoch), 0
        raise UsageError("survive(data=...): the stream yields nothing in a whole epoch")

    def _set_epoch(self) -> None:
        for one in (self._data, getattr(_inner(self._data), "dataset", None)):
            if callable(set_epoch := getattr(one, "set_epoch", None)):
                set_epoch(self._epoch)
                return

    def state_dict(self) -> dict[str, Any]:
        """The source's, and what it counts from."""
        fetcher = getattr(self._batches, "_dataset_fetcher", None)
        ended = bool(getattr(fetcher, "ended", False))  # a last batch that was not full
        return {
            "epoch": self._epoch + ended,
            "count": self._count,
            "of_epoch": 0 if ended else self._of_epoch,
            "workers": self._workers,
            "state": None if refills(self._source) else self._source.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if (saved := state["workers"]) != self._workers:
            raise MismatchError(
                f"survive(data=...): the checkpoint was made with num_workers={saved} and the "
                f"stream has num_workers={self._workers} now; each worker reads its own part, so "
                f"set num_workers={saved}, or begin a new run"
            )
        self._epoch, self._count = state["epoch"], state["count"]
        self._of_epoch = state["of_epoch"]
        self._set_epoch()
        if state["state"] is None:
            self._skip = self._of_epoch
        else:
            self._source.load_state_dict(state["state"])

    def close(self) -> None:
        self._batches = None


Supply: TypeAlias = MappedLoader | StreamedLoader


def _inner(data: Any) -> Any:
    for name in _SHELLS:
        if isinstance(inner := getattr(data, name, None), DataLoader):
            return inner
    return data


def _stateful(instance: Any) -> bool:
    return all(callable(getattr(instance, n, None)) for n in ("state_dict", "load_state_dict"))


def _source(data: Any, loader: Any) -> Any:
    """The object whose state is the place of a stream."""
    name = type(data).__name__
    if hasattr(data, "__next__"):
        raise UsageError(
            f"survive(data=...): a {name} ends once it was read, and has no place; {_NOT_HELD}"
        )
    if _stateful(loader):
        return loader
    if not isinstance(loader, DataLoader):
        raise UsageError(f"survive(data=...): the place in a {name} cannot be saved; {_NOT_HELD}")
    dataset = type(loader.dataset).__name__
    if not _stateful(loader.dataset):
        raise UsageError(
            f"survive(data=...): the place in the stream {dataset} cannot be saved; give it "
            "state_dict and load_state_dict, or take a data set with a length"
        )
    if loader.num_workers:
        raise UsageError(
            f"survive(data=...): a DataLoader does not tell how far its {loader.num_workers} "
            f"workers have read the stream {dataset}; take torchdata's StatefulDataLoader"
        )
    return loader.dataset


def refills(source: Any) -> bool:
    """Whether a stream of Hugging Face's is shuffled by a buffer, which its state leaves out."""
    at, seen = getattr(source, "_ex_iterable", None), 0
    while at is not None and seen < 64:
        if "BufferShuffled" in type(at).__name__:
            return True
        at, seen = getattr(at, "ex_iterable", None), seen + 1
    return False


def _rebuilt(loader: Any, dataset: DrawnDataset, ahead: _NotingSampler) -> Any:
    """A loader with the same options that reads what `ahead` says."""
    for name in _SHELLS:
        if isinstance(inner := getattr(loader, name, None), DataLoader):
            shell = copy.copy(loader)
            setattr(shell, name, _rebuilt(inner, dataset, ahead))
            return shell
    whole = loader.batch_sampler is None
    sampler = _NotingIndexSampler(ahead, hasattr(loader.sampler, "batch_size")) if whole else ahead
    init = partial(_begin_worker, loader.worker_init_fn)
    kind = type(loader).__iter__
    if kind not in (DataLoader.__iter__, ResumableDataLoader.__iter__) and not _stateful(loader):
        again = copy.copy(loader)  # a loader that does more with its batches
        vars(again).update(dataset=dataset, worker_init_fn=init, _iterator=None)
        vars(again)["sampler" if whole else "batch_sampler"] = sampler
        return again
    reads = {"batch_size": None, "sampler": sampler} if whole else {"batch_sampler": sampler}
    options: dict[str, Any] = reads | {name: getattr(loader, name) for name in _KEPT_OPTIONS}
    return DataLoader(dataset, worker_init_fn=init, **options)


def _begin_worker(then: Any, worker: int) -> None:
    show_own_dataset()
    if then is not None:
        then(worker)
