"""Samplers for torch's `DataLoader` whose place in the data is one integer.

    sampler = ResumableBatchSampler(dataset, batch_size=8, seed=0)
    loader = ResumableDataLoader(dataset, batch_sampler=sampler, num_workers=2)

The order is kempner's permutation, and `position` counts what the whole world has consumed: see
`kempner/data/order/global_batches.py`. An iterator begins at the position, so that a resume reads
nothing but what it trains on; and it never moves the position, since workers draw their indices
long before the loop gets the samples. What moves it is the loop: a `ResumableDataLoader` for each
batch that it hands over, `advance` after a batch of another loader, `set_epoch`, or
`set_position` and `load_state_dict`.
"""

from __future__ import annotations

import os
import warnings
from collections import deque
from collections.abc import Callable, Iterator, Sized
from contextlib import nullcontext
from functools import partial
from itertools import chain, islice, takewhile
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset, Sampler

from kempner.cluster.world import discover
from kempner.data.order.global_batches import GlobalBatches, samples_at, share, spans_from
from kempner.data.order.shuffle import PERMUTATION_VERSION
from kempner.run.process.exit_codes import MismatchError, UsageError
from kempner.run.process.worker_process import heed_only_parent, signals_blocked_in_children

T = TypeVar("T")
_LOOK_UP = 1024  # samples, of all ranks, whose place in the order is computed at a time


class _Resumable(Sampler[T]):
    """What the two samplers share: a position, and the batches that begin there."""

    def __init__(
        self,
        dataset: Sized,
        size: int,
        place: tuple[int, int],
        *,
        seed: int | None,
        drop_last: bool,
        infinite: bool,
    ) -> None:
        self.rank, self.num_replicas = place
        self.seed = seed
        self.drop_last, self.infinite = drop_last, infinite
        name = type(self).__name__
        if not hasattr(dataset, "__len__"):
            raise UsageError(
                f"{name}: {type(dataset).__name__} has no length; read iterable data with "
                "torchdata's StatefulDataLoader and save its state for each rank"
            )
        try:
            self.batches = GlobalBatches(len(dataset), size, place[1], drop_last, infinite)
            samples_at(range(1), len(dataset), self.seed)
        except ValueError as error:
            raise UsageError(f"{name}: {error}") from None
        self._position = 0
        self._epoch: int | None = None

    @property
    def position(self) -> int:
        """Samples that the whole world has consumed, all epochs together. An epoch's last ones
        that `drop_last` leaves out count as consumed.
        """
        return self._position

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self.batches.epoch(self._position)

    def set_position(self, position: int) -> None:
        """Go to a position. Iterators begin there from now on; one that has begun goes on as it
        was. Raises UsageError if it is negative.
        """
        if position < 0:
            raise UsageError(f"{type(self).__name__}: there is no position {position}")
        self._position, self._epoch = int(position), None

    def set_epoch(self, epoch: int) -> None:
        """The next iterator yields what is left of this epoch: all of it, unless the position is
        within it. An epoch before that of the position is done, and has nothing left; to repeat it
        use `set_position`.
        """
        self._epoch = epoch
        self._position = self.batches.epoch_start(epoch, self._position)

    def position_after(self, count: int) -> int:
        """The position when `count` more of what the sampler yields are consumed on each rank."""
        return self.batches.after(self._position, count)

    def advance(self, count: int = 1) -> None:
        """`count` more of what the sampler yields are consumed, on this rank and all others."""
        self._position = self.position_after(count)

    def state_dict(self) -> dict[str, Any]:
        """The position and what it refers to; the same on every rank."""
        return {"position": self._position, **self._order()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the position of a `state_dict()`, of any number of ranks and batch size.

        Raises MismatchError if it is of another data set or order.
        """
        for name, mine in self._order().items():
            if (saved := state_dict.get(name, mine)) != mine:
                raise MismatchError(
                    f"the checkpoint's data has {name}={saved}, this run's {name}={mine}: "
                    "give the sampler the same data and seed, or begin a new run"
                )
        self.set_position(state_dict["position"])

    def _order(self) -> dict[str, Any]:
        return {
            "samples": self.batches.samples,
            "seed": self.seed,
            "permutation": PERMUTATION_VERSION,
        }

    def _begin(self) -> tuple[int, int | None]:
        """Where an iterator begins, and the epoch that it ends with; None if it never ends."""
        position, epoch = self._position, self._epoch
        if self.infinite:
            return position, None
        if epoch is None:
            return position, self.epoch  # the next one where drop_last leaves out what is left
        if position // self.batches.samples > epoch:
            warnings.warn(
                f"epoch {epoch} yields nothing: at position {position} of {self.batches.samples} "
                "samples an epoch it is done",
                stacklevel=3,
            )
        return position, epoch

    def _length(self) -> int:
        """Batches of a whole epoch, wherever the position is."""
        if self.infinite:
            raise TypeError("an infinite sampler has no length")
        return self.batches.batches_left(0)


class _Shares:
    """This rank's samples in one global batch after another, up to the end of an epoch.

    It has a state of its own for a loader that saves those of its iterators, as torchdata's
    StatefulDataLoader does. That is of what it has yielded, however far it has looked up samples.
    """

    def __init__(self, sampler: _Resumable[Any], position: int, epoch: int | None) -> None:
        self._sampler, self._position, self._epoch = sampler, position, epoch
        self._ready: deque[tuple[list[int], int]] = deque()

    def state_dict(self) -> dict[str, Any]:
        return {"position": self._position, "epoch": self._epoch}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._position, self._epoch = state_dict["position"], state_dict["epoch"]
        self._ready.clear()

    def _next_share(self) -> list[int]:
        if not self._ready:
            self._look_up()
        if not self._ready:
            raise StopIteration
        share, self._position = self._ready.popleft()
        return share

    def _look_up(self) -> None:
        sampler, batches = self._sampler, self._sampler.batches
        ahead = islice(spans_from(batches, self._position), -(-_LOOK_UP // batches.size))
        spans = list(takewhile(self._is_meant, ahead))
        shares = [share(span, sampler.rank, sampler.num_replicas) for span in spans]
        found = iter(samples_at([*chain(*shares)], batches.samples, sampler.seed))
        for mine, span in zip(shares, spans, strict=True):
            self._ready.append((list(islice(found, len(mine))), span.stop))

    def _is_meant(self, span: range) -> bool:
        return self._epoch in (None, span.start // self._sampler.batches.samples)


class _BatchIterator(_Shares, Iterator[list[int]]):
    def __next__(self) -> list[int]:
        return self._next_share()


class _SampleIterator(_Shares, Iterator[int]):
    def __next__(self) -> int:
        (sample,) = self._next_share()
        return sample


class ResumableBatchSampler(_Resumable[list[int]]):
    """Yields the batches of one rank: `DataLoader(dataset, batch_sampler=...)`.

    `len()` is the number of batches in a whole epoch. (An epoch may have one less where the number
    of ranks does not divide that of the samples, see below.)

    Args:
        dataset: what has a length; only that is used.
        batch_size: samples of one batch on one rank.
        global_batch_size: instead: samples of one batch on all ranks together. It stays the same
            in any world. Where the ranks do not divide it, some get one sample more than others.
        num_replicas: number of data parallel ranks. By default those of torch.distributed, or, if
            that is not set up yet, those that the launcher has started.
        rank: which of them.
        seed: of the shuffle, the same on all ranks; None for the data set's own order.
        drop_last: leave out the last samples of an epoch if they do not make a full batch on every
            rank. Otherwise the last batch of an epoch is smaller, on all ranks alike; for that it
            takes up to `num_replicas - 1` samples from the next epoch, which has them less.
        infinite: never end. All batches are full; one may hold the end of an epoch and the
            beginning of the next.

    Raises UsageError for what cannot be, such as a batch of fewer samples than ranks.
    """

    def __init__(
        self,
        dataset: Sized,
        batch_size: int | None = None,
        *,
        global_batch_size: int | None = None,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = 0,
        drop_last: bool = False,
        infinite: bool = False,
    ) -> None:
        place = _place(num_replicas, rank)
        if (batch_size is None) == (global_batch_size is None):
            raise UsageError(
                "ResumableBatchSampler: give either batch_size, for one rank, or "
                "global_batch_size, for all together"
            )
        size = global_batch_size or (batch_size or 0) * place[1]
        super().__init__(dataset, size, place, seed=seed, drop_last=drop_last, infinite=infinite)
        self.batch_size = -(-size // place[1])
        """The most samples that one batch has on one rank."""

    def __iter__(self) -> Iterator[list[int]]:
        return _BatchIterator(self, *self._begin())

    def __len__(self) -> int:
        return self._length()


class ResumableSampler(_Resumable[int]):
    """Yields the samples of one rank, one at a time: `DataLoader(dataset, sampler=...,
    batch_size=...)`, where torch's `DistributedSampler` stood.

    What it yields is counted in samples: after a batch of b, `advance(b)`. So the loader may cut
    them into batches of any size; with a `ResumableDataLoader` take a `ResumableBatchSampler`.

    Args:
        dataset: what has a length; only that is used.
        num_replicas: number of data parallel ranks, see `ResumableBatchSampler`.
        rank: which of them.
        seed: of the shuffle, the same on all ranks; None for the data set's own order.
        drop_last: leave out the last samples of an epoch if there are not as many for each rank.
            Otherwise up to `num_replicas - 1` samples are taken from the next epoch, which has
            them less: nothing comes twice.
        infinite: never end.

    Raises UsageError as `ResumableBatchSampler`.
    """

    def __init__(
        self,
        dataset: Sized,
        *,
        num_replicas: int | None = None,
        rank: int | None = None,
        seed: int | None = 0,
        drop_last: bool = False,
        infinite: bool = False,
    ) -> None:
        place = _place(num_replicas, rank)
        super().__init__(
            dataset, place[1], place, seed=seed, drop_last=drop_last, infinite=infinite
        )

    def __iter__(self) -> Iterator[int]:
        return _SampleIterator(self, *self._begin())

    def __len__(self) -> int:
        return self._length()


class ResumableDataLoader(DataLoader[T]):
    """A `DataLoader` that advances its batch sampler by each batch that it hands over.

    So `state_dict()` says at any moment what the loop has received, however far workers have read
    ahead: to be saved after the step that trains on the batch. Save and load it as the state of
    one object for all ranks; load it before iterating. All arguments but the first two are
    DataLoader's.

    The seeds of its workers come from a generator of its own, so that it draws none of the numbers
    of torch's global one. A stop signal that reaches a worker, too, as those of a terminal and of
    Slurm do, does not end it: the rank decides when to stop.
    """

    def __init__(
        self, dataset: Dataset[T], batch_sampler: ResumableBatchSampler, **options: Any
    ) -> None:
        if not isinstance(batch_sampler, ResumableBatchSampler):
            raise UsageError("ResumableDataLoader: it needs a ResumableBatchSampler")
        options.setdefault("generator", torch.Generator().manual_seed(batch_sampler.seed or 0))
        options["worker_init_fn"] = partial(_begin_worker, options.get("worker_init_fn"))
        super().__init__(dataset, batch_sampler=batch_sampler, **options)
        self._resumable = batch_sampler

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        with signals_blocked_in_children() if self.num_workers else nullcontext():
            batches = super().__iter__()
        return self._handed_over(batches)

    def _handed_over(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._resumable.advance()
            yield batch

    def set_epoch(self, epoch: int) -> None:
        """As the sampler's."""
        self._resumable.set_epoch(epoch)

    def left(self) -> int:
        """Batches that are left of the epoch, as far as they have been handed over."""
        return self._resumable.batches.batches_left(self._resumable.position)

    def state_dict(self) -> dict[str, Any]:
        """As the sampler's: what has been handed over."""
        return self._resumable.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """As the sampler's."""
        self._resumable.load_state_dict(state_dict)


def _begin_worker(then: Callable[[int], object] | None, worker: int) -> None:
    heed_only_parent()
    if then is not None:
        then(worker)


def _place(num_replicas: int | None, rank: int | None) -> tuple[int, int]:
    """(rank, number of ranks): as given, or torch.distributed's, or the launcher's."""
    if (num_replicas is None) != (rank is None):
        raise UsageError("a sampler needs both num_replicas and rank, or neither")
    if num_replicas is None or rank is None:
        if dist.is_available() and dist.is_initialized():
            return dist.get_rank(), dist.get_world_size()
        try:
            world = discover(os.environ)
        except ValueError as error:
            raise UsageError(f"a sampler does not know which rank this is: {error}") from None
        return world.rank, world.size
    if not 0 <= rank < num_replicas:
        raise UsageError(f"a sampler cannot be that of rank {rank} of {num_replicas}")
    return rank, num_replicas
