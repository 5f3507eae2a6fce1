"""The place of a Trainer in its data, counted in samples, so that any number of ranks finds it;
and what else its loop knows, one file a rank beside the Trainer's own checkpoint.

An epoch has one order of its samples, whatever the ranks: each micro batch of the world takes the
next samples of it. Accelerate deals them out to the ranks; what comes first is decided here.

In this process the loop fetches one micro batch ahead of what it trains on. So its augmentation or
masking draws before the state of the generators that a checkpoint holds, and those that follow draw
after it. In a loader's workers each micro batch draws from generators that its number seeds.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import (  # type: ignore[import-untyped]
    DataLoaderDispatcher,
    SeedableRandomSampler,
)
from accelerate.utils import send_to_device  # type: ignore[import-untyped]
from torch.utils.data import IterableDataset, RandomSampler, Sampler
from transformers import Trainer
from transformers.trainer_callback import ExportableState

from kempner.cluster.world import World
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class _FetchedBatch:
    """The micro batch that had been fetched ahead."""

    number: int
    before_fetch: dict[str, Any]
    resume: Callable[[], None]


class FetchObserver:
    """Told of each micro batch that is about to be fetched, and the end, counted from 1."""

    def __init__(self) -> None:
        self.before_fetch: dict[str, Any] | None = None
        """The generators before the last one was fetched."""
        self._continued: _FetchedBatch | None = None
        self._ahead: _FetchedBatch | None = None

    def continue_after(
        self, micro_batches: int, before_fetch: dict[str, Any], resume: Callable[[], None]
    ) -> None:
        """The next epoch trains on `micro_batches`; the one after them was fetched ahead, and
        `resume` follows that."""
        self._continued = _FetchedBatch(micro_batches + 1, before_fetch, resume)

    def begin(self) -> None:
        self._ahead, self._continued = self._continued, None

    def fetch(self, number: int) -> None:
        ahead = self._ahead
        if ahead is not None and number == ahead.number:
            _set_generators(ahead.before_fetch)
        elif ahead is not None and number > ahead.number:
            ahead.resume()
            self._ahead = None
        self.before_fetch = _generators()


class WorkerDraws:
    """What seeds the workers of a loader, each micro batch anew; `rank` draws unlike the others."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        self._collate, self._prepare = loader.collate_fn, loader.worker_init_fn
        self._workers, self._seed = loader.num_workers, (seed, rank)
        self._epoch, self._number = 0, 0
        loader.collate_fn, loader.worker_init_fn = self.collate, self.prepare

    def begin(self, epoch: int, micro_batches: int) -> None:
        """Workers that start now fetch what comes after `micro_batches` of an epoch."""
        self._epoch, self._number = epoch, micro_batches

    def prepare(self, worker: int) -> None:
        """In a worker that starts: its first micro batch comes next."""
        if self._prepare is not None:
            self._prepare(worker)
        self._number += worker
        self._seed_all()

    def collate(self, samples: Any) -> Any:
        """In a worker: the last part of a micro batch; the one after it comes next."""
        batch = self._collate(samples)
        self._number += self._workers
        self._seed_all()
        return batch

    def _seed_all(self) -> None:
        key = repr((*self._seed, self._epoch, self._number)).encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=4).digest())
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)


def _generators() -> dict[str, Any]:
    """Python's, NumPy's and torch's on the CPU, as a file of weights only takes them."""
    name, keys, *rest = np.random.get_state()
    numpy = (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest)
    return {"python": random.getstate(), "numpy": numpy, "torch": torch.get_rng_state()}


def _set_generators(states: dict[str, Any]) -> None:
    name, keys, *rest = states["numpy"]
    random.setstate(states["python"])
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])


@dataclass(frozen=True)
class TrainerPlace:
    """`samples` of epoch `epoch` are done, over all ranks; a step takes `per_step` of them.

    `ranks` is how many there were, and `order` the state of the generator from which this epoch's
    order is drawn, where it must be known. `draws` are the generators before the micro batch was
    fetched that comes next, where it was fetched in this process.
    """

    epoch: int = 0
    samples: int = 0
    per_step: int = 0
    ranks: int = 1
    order: torch.Tensor | None = None
    draws: dict[str, Any] | None = None

    @classmethod
    def of_step(cls, step: int, ranks: int, grid: Grid, ranks_now: int) -> TrainerPlace:
        """Where a run stood after `step` steps on `ranks` ranks, of which nothing else is known.
        `grid` is how `ranks_now` ranks cut the data."""
        batch = grid.batch * ranks // ranks_now
        micro_batches = grid.micro_batches
        if grid.samples is not None:
            micro_batches = _divide(grid.samples, batch, grid.drop_last)
        before = replace(grid, batch=batch, micro_batches=micro_batches)
        epoch, steps = divmod(step, before.updates)
        return cls(epoch, steps * before.per_step, before.per_step, ranks)


@dataclass(frozen=True)
class Grid:
    """How an epoch of `samples` (None if unknown) is cut: a micro batch of the world takes `batch`,
    and `accumulation` of them make a step; an epoch has `micro_batches`."""

    samples: int | None
    batch: int
    accumulation: int
    micro_batches: int
    drop_last: bool = False

    @property
    def per_step(self) -> int:
        """The samples of a step, over all ranks."""
        return self.batch * self.accumulation

    @property
    def updates(self) -> int:
        return math.ceil(self.micro_batches / self.accumulation)


@dataclass(frozen=True)
class Leg:
    """The rest of an epoch from `start` samples on, as the Trainer's loop counts it. It counts
    `done` of `micro_batches` as made, whole steps. Where `start` is none of this world's boundaries
    the samples between the two are left out of its count."""

    start: int
    done: int
    micro_batches: int
    updates: int

    @classmethod
    def after(cls, place: TrainerPlace, grid: Grid) -> Leg:
        steps = place.samples // grid.per_step
        done = steps * grid.accumulation
        if grid.samples is None or place.samples == done * grid.batch:
            return cls(place.samples, done, grid.micro_batches, grid.updates)
        left = _divide(grid.samples - place.samples, grid.batch, grid.drop_last)
        return cls(place.samples, done, done + left, steps + math.ceil(left / grid.accumulation))

    def samples(self, made: int, grid: Grid) -> int:
        """How many samples of the epoch are done after `made` micro batches."""
        return self.start + (made - self.done) * grid.batch


def steps_to_go(place: TrainerPlace, grid: Grid, epochs: float) -> int:
    """The steps from `place` to the end of `epochs` epochs."""
    if place.epoch >= epochs:
        return 0
    leg = Leg.after(place, grid)
    rest = leg.updates - leg.done // grid.accumulation
    if epochs < place.epoch + 1:  # the end is within this epoch
        assert grid.samples is not None  # only an epoch of known length has a part
        part = (epochs - place.epoch) * grid.samples - place.samples
        return min(rest, max(0, math.ceil(part / grid.per_step)))
    return rest + math.ceil((epochs - place.epoch - 1) * grid.updates)


class PlacedSampler(Sampler[int]):
    """The indices of `inner`; `continue_at` has the next iteration go on within an epoch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.draws = FetchObserver()
        self.batch = 0
        """The samples of a micro batch of the world, where this process fetches them; else 0."""
        self._drawn_from: torch.Tensor | None = None
        self._left_out = range(0)
        self._order: torch.Tensor | None = None

    def continue_at(self, place: TrainerPlace, skipped: int) -> None:
        """Leave out the samples up to `place`; the loop itself skips the first `skipped`."""
        self._left_out, self._order = range(skipped, place.samples), place.order

    def order(self, begun: bool) -> torch.Tensor | None:
        """The generator's state from which the order of this epoch was drawn, or is to be; None
        where the sampler seeds its generator for each epoch."""
        if isinstance(self.inner, SeedableRandomSampler):
            return None
        if begun:
            return self._drawn_from
        return None if self._own is None else self._own.get_state()

    def __iter__(self) -> Iterator[int]:
        order, left_out = self._order, self._left_out
        self._order, self._left_out = None, range(0)
        if order is not None:
            self._set_generator(order)
        self._drawn_from = torch.get_rng_state() if self._own is None else self._own.get_state()
        self.draws.begin()
        given = 0
        for at, index in enumerate(self.inner):
            if at not in left_out:
                given += 1
                if self.batch and given % self.batch == 0:
                    self.draws.fetch(given // self.batch)
                yield index
        if self.batch:
            self.draws.fetch(given // self.batch + 1)  # what is left, or nothing

    def __len__(self) -> int:
        return len(self.inner)

    def set_epoch(self, epoch: int) -> None:
        if hasattr(self.inner, "set_epoch"):
            self.inner.set_epoch(epoch)

    @property
    def _own(self) -> torch.Generator | None:
        generator = getattr(self.inner, "generator", None)
        return generator if isinstance(generator, torch.Generator) else None

    def _set_generator(self, state: torch.Tensor) -> None:
        if self._own is None:
            torch.set_rng_state(state)
        else:
            self._own.set_state(state)


class DataPlace:
    """Where training stands in the data, step by step. `take` and `cut` come first, then
    `continue_at` in a run that was begun before."""

    def __init__(self, world: World, accumulation: int, seed: int) -> None:
        self.world, self._seed = world, seed
        self._sampler: PlacedSampler | None = None
        self._loader: Any = None
        self._worker_draws: WorkerDraws | None = None
        self.grid = Grid(None, 1, accumulation, 1)
        """How an epoch is cut."""
        self._epoch, self._made = 0, 0
        self._leg, self._continued = Leg(0, 0, 1, 1), False
        self.left_epoch: int | None = None
        """The epoch of which nothing more is to be seen."""

    def take(self, loader: Any) -> None:
        """Training reads this loader, whose order of samples comes from our sampler now."""
        self._loader = loader
        batches: Any = getattr(loader, "batch_sampler", None)
        batches = getattr(batches, "batch_sampler", batches)
        sampler = getattr(batches, "sampler", None)
        if not _is_bound_to_ranks(loader, sampler):
            batches.sampler = self._sampler = PlacedSampler(sampler)

    def cut(self, micro_batches: int) -> None:
        loader, samples = self._loader, None if self._sampler is None else len(self._sampler)
        batch = getattr(loader, "total_batch_size", None) or loader.batch_size or 1
        drop_last = bool(getattr(loader, "_drop_last", loader.drop_last))
        accumulation = self.grid.accumulation
        self.grid = Grid(samples, batch, accumulation, micro_batches, drop_last)
        if self._sampler is None or loader.persistent_workers:
            return
        if loader.num_workers == 0:
            self._sampler.batch = batch
        else:
            reader = getattr(loader, "base_dataloader", loader)
            self._worker_draws = WorkerDraws(reader, self._seed, self.world.rank)

    def continue_at(self, place: TrainerPlace, resume: Callable[[], None]) -> Leg:
        """Go on from `place`; what is left of its epoch. `resume` brings the generators of random
        numbers back, where it is called after the micro batch that had been fetched ahead. Raises
        `UsageError`, on all ranks alike, if this loader finds it on as many ranks only."""
        ranks, per_step = self.world.size, self.grid.per_step
        moved = (place.ranks, place.per_step) != (ranks, per_step)
        if moved and (why := _why_bound(self._sampler)):
            raise UsageError(
                f"the run was stopped on {place.ranks} ranks with {place.per_step} samples a step, "
                f"here are {ranks} with {per_step}, and {why}: go on with as many"
            )
        self._leg, self._epoch, self._continued = Leg.after(place, self.grid), place.epoch, True
        self._made = self._leg.done
        if self._sampler is not None:
            self._sampler.continue_at(place, self._leg.done * self.grid.batch)
            if place.draws is not None and place.samples > 0 and not moved:
                self._sampler.draws.continue_after(self._leg.done, place.draws, resume)
        return self._leg

    def begin_epoch(self, epoch: int) -> Leg:
        """`epoch` begins, or goes on; how it is counted."""
        if not self._continued or epoch != self._epoch:
            self._epoch, self._made = epoch, 0
            self._leg = Leg(0, 0, self.grid.micro_batches, self.grid.updates)
        self._continued = False
        if self._worker_draws is not None:
            self._worker_draws.begin(epoch, self._leg.done)
        return self._leg

    def leave_epoch(self, left: bool) -> None:
        """If `left`, the epoch that was to be continued is not."""
        if left and self._leg.start > 0:
            self.left_epoch = self._epoch

    def step(self) -> None:
        self._made = min(self._made + self.grid.accumulation, self._leg.micro_batches)

    @property
    def epoch_is_over(self) -> bool:
        """Whether the last step was the last of its epoch."""
        return self._made >= self._leg.micro_batches

    def place(self, epoch_is_over: bool) -> TrainerPlace:
        """Where training stands; at the start of the next epoch, if this one is over."""
        epoch, samples = self._epoch + 1, 0
        if not epoch_is_over:
            epoch, samples = self._epoch, self._leg.samples(self._made, self.grid)
        place = TrainerPlace(epoch, samples, self.grid.per_step, self.world.size)
        if self._sampler is None:
            return place
        order = self._sampler.order(begun=samples > 0)
        return replace(place, order=order, draws=self._sampler.draws.before_fetch)


def _is_bound_to_ranks(loader: Any, sampler: Any) -> bool:
    """Whether what the sampler yields is one rank's share, or no single sample."""
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader, DataLoaderDispatcher):
        return True
    return sampler is None or hasattr(sampler, "num_replicas")


def _why_bound(sampler: PlacedSampler | None) -> str:
    """Why another number of ranks would see other samples; empty if it would not."""
    if sampler is None:
        return "its loader's order depends on the ranks"
    if hasattr(sampler.inner, "repeat_count"):
        return "what its trainer generates depends on the ranks"
    if type(sampler.inner) is RandomSampler:
        return "with use_seedable_sampler=False the order depends on the ranks"
    return ""


def _divide(samples: int, batch: int, drop_last: bool) -> int:
    return samples // batch if drop_last else math.ceil(samples / batch)


HELD = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_pending_metrics",
    "_total_train_tokens",
    "_entropy_window_stats",
    "_last_world_entropy",
)
"""Attributes of TRL's trainers that live across steps and are in no checkpoint of theirs."""


@dataclass(frozen=True)
class DueWork:
    """What the Trainer had yet to do after the step of a checkpoint, in its order; `ends` is
    whether a callback had ended the training, and `grad_norm` and `learning_rate` are for the log.
    """

    evaluate: bool = False
    save: bool = False
    epoch_end: bool = False
    ends: bool = False
    grad_norm: float | None = None
    learning_rate: float | None = None

    @property
    def anything(self) -> bool:
        return self.evaluate or self.save or self.epoch_end


@dataclass(frozen=True)
class TrainerProgress:
    """What a rank's loop knows beside the Trainer's state.

    `loss` is the sum of the losses since the last log, which was after step `logged`; `total_loss`
    that of those before. `first_step` is where the run began, `seconds` how long it has trained,
    `kept` the steps that the Trainer itself saved. `callbacks` are the states of its callbacks, by
    class and in order; `held` is what a trainer of TRL holds.
    """

    place: TrainerPlace | None = None
    due: DueWork = DueWork()
    loss: torch.Tensor | None = None
    total_loss: float = 0.0
    logged: int = 0
    first_step: int = 0
    seconds: float = 0.0
    kept: tuple[int, ...] = ()
    callbacks: tuple[tuple[str, dict[str, Any]], ...] = ()
    held: dict[str, Any] = field(default_factory=dict)

    def save(self, folder: Path, rank: int) -> None:
        assert self.place is not None  # only one of before there were any has none
        nested = {"place": vars(self.place), "due": vars(self.due)}
        torch.save(vars(self) | nested, _file(folder, rank))

    @classmethod
    def load(cls, folder: Path, rank: int, ranks: int) -> TrainerProgress | None:
        """This rank's of a checkpoint, or of other ranks than before what is true of them all. None
        if the checkpoint is of before there were any."""
        if not _file(folder, 0).exists():
            return None
        first = cls._read(folder, 0)
        assert first.place is not None  # none is written without
        if first.place.ranks == ranks:
            return first if rank == 0 else cls._read(folder, rank)
        all_of_them = [cls._read(folder, old) for old in range(first.place.ranks)]
        losses = [each.loss for each in all_of_them if each.loss is not None]
        return replace(first, loss=torch.stack(losses).mean(0))

    @classmethod
    def _read(cls, folder: Path, rank: int) -> TrainerProgress:
        fields = torch.load(_file(folder, rank), map_location="cpu", weights_only=True)
        place, due = TrainerPlace(**fields["place"]), DueWork(**fields["due"])
        return cls(**fields | {"place": place, "due": due})


def callback_states(trainer: Trainer) -> tuple[tuple[str, dict[str, Any]], ...]:
    """Of the callbacks that have a state, each with its class, in order."""
    return tuple((type(each).__name__, each.state()) for each in _stateful(trainer))


def restore_callbacks(trainer: Trainer, states: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    """Give each callback what the one of its class, first to first, had."""
    left = list(states)
    for callback in _stateful(trainer):
        mine = next(
            (at for at, (name, _) in enumerate(left) if name == type(callback).__name__), None
        )
        if mine is not None:
            for name, value in left.pop(mine)[1].get("attributes", {}).items():
                setattr(callback, name, value)


def held_by(trainer: Trainer) -> dict[str, Any]:
    return {name: _plain(getattr(trainer, name)) for name in HELD if hasattr(trainer, name)}


def give_back(trainer: Trainer, held: dict[str, Any]) -> None:
    known = {name: held[name] for name in held if hasattr(trainer, name)}
    _refill(vars(trainer), send_to_device(known, trainer.args.device))


def _stateful(trainer: Trainer) -> list[Any]:
    return [
        each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)
    ]


def _plain(value: Any) -> Any:
    """Without the classes that a file of weights only does not take."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _refill(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Set what is in `values`; dicts stay the objects that they are."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _refill(into[key], value)
        else:
            into[key] = value


def _file(folder: Path, rank: int) -> Path:
    return folder / f"kempner-{rank}.pt"
