"""Which samples a map-style loader reads next, from any place on.

The order of an epoch is drawn again from the seed and the epoch's number, so that a place is one or
two integers. `SharedOrder` is one order for all ranks, divided batch by batch
(`global_batches.py`); it goes on with any number of ranks. `RankOrder` is the order of a sampler
that only its rank knows.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from kempner.data.order.global_batches import GlobalBatches, samples_at, share
from kempner.data.serve.sample_rng import SampleRequest, generators_of, kept, key, seed_all
from kempner.data.serve.sampler import ResumableBatchSampler, ResumableSampler
from kempner.run.process.exit_codes import MismatchError, UsageError

Draw: TypeAlias = Callable[[int], Sequence[Any]]  # the order of an epoch
_OF_TORCH = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler)
"""Samplers that know nothing of ranks."""

_COMPARED = 1024  # how many samples of the first epoch are compared across ranks


class Batch(NamedTuple):
    """What a loader is to read, and where the run stands when the loop has had it."""

    items: list[SampleRequest]
    after: Any


class SharedOrder:
    """One order for all ranks; `place` is the position in it, all epochs together. `facts` must be
    equal on all ranks; `left` is the number of batches that are left in the epoch of `place`,
    `of_whole_epoch` that of an epoch of which nothing is done."""

    shared = True  # the place is the same on all ranks

    def __init__(
        self, batches: GlobalBatches, rank: int, seed: int, look_up: Callable[[range], list[Any]]
    ) -> None:
        self._batches, self._rank, self._seed, self._look_up = batches, rank, seed, look_up
        self.place = 0
        self._order = f"{key(look_up(range(min(batches.samples, _COMPARED)))):x}"
        self.facts = {
            "the number of samples of data": batches.samples,
            "the global batch of data": batches.size,
            "the order of data's samples": self._order,
        }

    @property
    def epoch(self) -> int:
        return self._batches.epoch(self.place)

    def rest_of_epoch(self) -> Iterator[Batch]:
        position, epoch, batches = self.place, self.epoch, self._batches
        while batches.infinite or batches.epoch(position) == epoch:
            mine = share(batches.span(position), self._rank, batches.world)
            position = batches.after(position, 1)
            indices = self._look_up(mine)
            items = [
                SampleRequest(i, key(self._seed, at)) for i, at in zip(indices, mine, strict=True)
            ]
            yield Batch(items, position)

    def left(self) -> int:
        return self._batches.batches_left(self.place)

    def of_whole_epoch(self) -> int:
        return self._batches.batches_left(0)

    def begin_epoch(self, epoch: int) -> None:
        """Go to the first position of the epoch that no batch has had."""
        self.place = self._batches.epoch_start(epoch, self.place)

    def state_dict(self) -> dict[str, Any]:
        samples = self._batches.samples
        return {"position": self.place, "samples": samples, "order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a position of any number of ranks and any batch size."""
        if (saved := state.get("samples")) != (mine := self._batches.samples):
            raise MismatchError(
                f"the checkpoint was made with data of {saved} samples, this run's has {mine}: "
                "give survive(data=...) the same data, or begin a new run"
            )
        if state.get("order", self._order) != self._order:
            raise MismatchError(
                "the checkpoint was made with the samples of data in another order: give "
                "survive(data=...) the same data, sampler and seed, or begin a new run"
            )
        self.place = state["position"]


class RankOrder:
    """The order of a sampler on this rank; `place` is the epoch and how many batches are done."""

    shared = False

    def __init__(self, draw: Draw, size: int | None, drop_last: bool, seed: int) -> None:
        self._draw, self._size, self._drop_last, self._seed = draw, size, drop_last, seed
        self.place = (0, 0)
        self.facts: dict[str, object] = {}

    @property
    def epoch(self) -> int:
        """The epoch of the next batch, as far as that is known: it may be the end of the last."""
        return self.place[0]

    def rest_of_epoch(self) -> Iterator[Batch]:
        epoch, done = self.place
        cut = self._cut(self._draw(epoch))
        for at in range(done, len(cut)):
            seeds = (key(self._seed, epoch, at, n) for n in range(len(cut[at])))
            after = (epoch, at + 1) if at + 1 < len(cut) else (epoch + 1, 0)
            yield Batch([SampleRequest(*pair) for pair in zip(cut[at], seeds, strict=True)], after)

    def left(self) -> int:
        return len(self._cut(self._draw(self.place[0]))) - self.place[1]

    def of_whole_epoch(self) -> int:
        return self.left() + self.place[1]

    def begin_epoch(self, epoch: int) -> None:
        self.place = max(self.place, (epoch, 0))

    def _cut(self, order: Sequence[Any]) -> Sequence[Any]:
        if self._size is None:
            return order  # of batches
        size = self._size
        last = len(order) // size * size if self._drop_last else len(order)
        return [order[start : start + size] for start in range(0, last, size)]

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self.place[0], "batches": self.place[1]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.place = (state["epoch"], state["batches"])


ReadPlan: TypeAlias = SharedOrder | RankOrder


class _Reads(NamedTuple):
    """How a loader is read: `sampler` in batches of `size`; whole batches of it where None. `place`
    is the one that the loader names itself: (rank, number of ranks). A `prepared` loader has a
    generator that accelerate has made, with another seed at each start."""

    sampler: Any
    size: int | None
    drop_last: bool = False
    place: tuple[int, int] | None = None
    prepared: bool = False


def plan_of(loader: DataLoader[Any], seed: int, place: tuple[int, int]) -> ReadPlan:
    """How a map-style loader is read by the rank of `place`: (rank, number of ranks). `seed` is
    that of shuffles without a generator of their own. Raises `UsageError`, in one sentence, for a
    sampler whose order cannot be drawn again."""
    reads = _reading_order(loader)
    sampler, size = reads.sampler, reads.size
    if isinstance(sampler, ResumableBatchSampler):
        return _resumable(sampler, sampler.batches)
    if size is None:
        return RankOrder(_redrawn(sampler, seed), None, False, seed)
    if isinstance(sampler, ResumableSampler):
        of_all = sampler.batches
        cut = _cut(of_all.samples, size, of_all.world, reads.drop_last, of_all.infinite)
        return _resumable(sampler, cut)
    if reads.place is None and not any(_is_a(sampler, kind) for kind in _OF_TORCH):
        return RankOrder(_redrawn(sampler, seed), size, reads.drop_last, seed)
    known = isinstance(sampler, (*_OF_TORCH, DistributedSampler))
    generator = None if reads.prepared else getattr(sampler, "generator", None)
    base = seed if generator is None else generator.initial_seed()
    draw = _drawn_by_torch(sampler, base) if known else _redrawn(sampler, seed)
    samples = len(draw(0))
    rank, ranks = reads.place or place
    return SharedOrder(_cut(samples, size, ranks, reads.drop_last), rank, seed, _at(draw, samples))


def _reading_order(loader: DataLoader[Any]) -> _Reads:
    cutter: Any = loader.batch_sampler
    place, prepared = None, type(cutter).__name__ == "BatchSamplerShard"
    if cutter is None and isinstance(loader.sampler, BatchSampler):
        cutter = loader.sampler
    if prepared:  # by accelerate, on several ranks
        if cutter.split_batches:
            raise UsageError(
                "survive(data=...): a loader that was prepared with split_batches=True cannot be "
                "resumed exactly; leave that out and divide the batch size by the ranks"
            )
        place, cutter = (cutter.process_index, cutter.num_processes), cutter.batch_sampler
    if cutter is None:
        sampler: Any = loader.sampler
        return _Reads(sampler, 1, place=_named_by(sampler))
    if not _is_a(cutter, BatchSampler):
        return _Reads(cutter, None)
    sampler = cutter.sampler
    place = place or _named_by(sampler)
    return _Reads(sampler, cutter.batch_size, cutter.drop_last, place, prepared)


def _named_by(sampler: object) -> tuple[int, int] | None:
    if type(sampler) is DistributedSampler:
        return sampler.rank, sampler.num_replicas
    return None


def _is_a(sampler: object, kind: type) -> bool:
    """Whether it is that class itself, or what torchdata's loader puts in its place."""
    stands_in = type(sampler).__module__.startswith("torchdata.")
    return type(sampler) is kind or (stands_in and type(sampler).__name__ == kind.__name__)


def _resumable(
    sampler: ResumableBatchSampler | ResumableSampler, batches: GlobalBatches
) -> SharedOrder:
    def look_up(positions: range) -> list[int]:
        return samples_at(positions, batches.samples, sampler.seed)

    plan = SharedOrder(batches, sampler.rank, sampler.seed or 0, look_up)
    plan.place = sampler.position
    return plan


def _cut(
    samples: int, size: int, ranks: int, drop_last: bool, infinite: bool = False
) -> GlobalBatches:
    try:
        return GlobalBatches(samples, size * ranks, ranks, drop_last, infinite)
    except ValueError as error:
        raise UsageError(f"survive(data=...): {error}") from None


def _at(draw: Draw, samples: int) -> Callable[[range], list[Any]]:
    def look_up(positions: range) -> list[Any]:
        places = (divmod(position, samples) for position in positions)
        return [draw(epoch)[index] for epoch, index in places]

    return look_up


def _drawn_by_torch(sampler: Any, base: int) -> Draw:
    """The orders of a sampler of torch's, or of one that is known not to ask for its rank."""

    @lru_cache(maxsize=2)  # a batch may hold the end of an epoch and the beginning of the next
    def draw(epoch: int) -> Sequence[Any]:
        if isinstance(sampler, SequentialSampler):
            return range(len(sampler))
        if isinstance(sampler, DistributedSampler):
            return _order_of_distributed(sampler, epoch)
        again = copy.copy(sampler)
        again.generator = torch.Generator().manual_seed(key(base, epoch))
        if hasattr(again, "set_epoch"):
            again.set_epoch(epoch)
        with kept():
            seed_all(key(base, epoch))
            return _compact([*again])

    return draw


def _order_of_distributed(sampler: DistributedSampler[Any], epoch: int) -> Sequence[Any]:
    whole: DistributedSampler[Any] = DistributedSampler(
        sampler.dataset, num_replicas=1, rank=0, shuffle=sampler.shuffle, seed=sampler.seed
    )
    whole.set_epoch(epoch)
    return _compact([*whole])


def _compact(order: list[Any]) -> Sequence[Any]:
    """The same, in an eighth of the memory where it is of integers."""
    return array("q", order) if len(order) > _COMPARED and type(order[0]) is int else order


def _redrawn(sampler: Any, seed: int) -> Draw:
    """The orders of a sampler of the user's: with its generators seeded by the epoch. Raises
    `UsageError` if it does not give the same order twice."""
    name = type(sampler).__name__
    if not hasattr(sampler, "__len__"):
        raise UsageError(
            f"survive(data=...): {name} has no length, so that no place in it can be found again; "
            "give it __len__, or take kempner's ResumableBatchSampler"
        )

    @lru_cache(maxsize=1)
    def draw(epoch: int) -> Sequence[Any]:
        generators = generators_of(sampler)
        with kept(generators):
            if callable(set_epoch := getattr(sampler, "set_epoch", None)):
                set_epoch(epoch)
            seed_all(key(seed, epoch), generators)
            order = [*islice(iter(sampler), len(sampler) + 1)]
        if len(order) > len(sampler):
            raise UsageError(
                f"survive(data=...): {name} yields more than its length of {len(sampler)}; have "
                "it end with the epoch: the loop goes on with the next one by itself"
            )
        return order

    first = draw(0)
    draw.cache_clear()
    if draw(0) != first:
        raise UsageError(
            f"survive(data=...): {name} does not give the same order twice, so that no place in "
            "it can be found again; give it set_epoch(epoch), and draw from the epoch"
        )
    if not first:
        raise UsageError(f"survive(data=...): {name} yields nothing")
    return draw
