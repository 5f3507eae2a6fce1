"""The place of a Trainer in its data, counted in samples, so that any number of ranks can resume
from it; and other state of its loop, in a file per rank beside the Trainer's own checkpoint.

An epoch has one order of samples, independent of the number of ranks: each micro batch of the world
takes the next samples in it. Accelerate distributes them to the ranks.

If samples are fetched in the rank's process, the loop fetches one micro batch ahead. Its
augmentation or masking draws random numbers before the generators' state is saved, and later micro
batches after it. In a loader's workers each micro batch draws from generators seeded by its number.
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
    """The micro batch that was prefetched at the checkpoint."""

    number: int
    before_fetch: dict[str, Any]
    resume: Callable[[], None]


class FetchObserver:
    """Called before each fetch of a micro batch, and at the end, with its number from 1; restores
    the generators around the prefetched one."""

    def __init__(self) -> None:
        self.before_fetch: dict[str, Any] | None = None
        """The generators' states before the last fetch."""
        self._continued: _FetchedBatch | None = None
        self._ahead: _FetchedBatch | None = None

    def continue_after(
        self, micro_batches: int, before_fetch: dict[str, Any], resume: Callable[[], None]
    ) -> None:
        """Resume after `micro_batches` of the next epoch: the one after them was prefetched, and
        `resume` is called after fetching it."""
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
    """Seeds the workers of a loader for each micro batch, differently on each `rank`."""

    def __init__(self, loader: Any, seed: int, rank: int) -> None:
        self._collate, self._prepare = loader.collate_fn, loader.worker_init_fn
        self._workers, self._seed = loader.num_workers, (seed, rank)
        self._epoch, self._number = 0, 0
        loader.collate_fn, loader.worker_init_fn = self.collate, self.prepare

    def begin(self, epoch: int, micro_batches: int) -> None:
        """Set the place for workers that start now: after `micro_batches` of an epoch."""
        self._epoch, self._number = epoch, micro_batches

    def prepare(self, worker: int) -> None:
        """Called in a worker at its start, before its first micro batch."""
        if self._prepare is not None:
            self._prepare(worker)
        self._number += worker
        self._seed_all()

    def collate(self, samples: Any) -> Any:
        """Called in a worker at the end of a micro batch; seeds for its next one."""
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
    """The states of Python's, NumPy's and torch's CPU generators, loadable with `weights_only`."""
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
    """A place in the data: `samples` of epoch `epoch` are done, over all ranks, with `per_step`
    samples per step, on `ranks` ranks. `order` is the state of the generator from which the epoch's
    order is drawn, if it is needed. `draws` are the generators' states before the fetch of the next
    micro batch, if this process fetches it."""

    epoch: int = 0
    samples: int = 0
    per_step: int = 0
    ranks: int = 1
    order: torch.Tensor | None = None
    draws: dict[str, Any] | None = None

    @classmethod
    def of_step(cls, step: int, ranks: int, grid: Grid, ranks_now: int) -> TrainerPlace:
        """The place after `step` steps on `ranks` ranks, for a checkpoint without one. `grid` is
        that of the present `ranks_now` ranks."""
        batch = grid.batch * ranks // ranks_now
        micro_batches = grid.micro_batches
        if grid.samples is not None:
            micro_batches = _divide(grid.samples, batch, grid.drop_last)
        before = replace(grid, batch=batch, micro_batches=micro_batches)
        epoch, steps = divmod(step, before.updates)
        return cls(epoch, steps * before.per_step, before.per_step, ranks)


@dataclass(frozen=True)
class Grid:
    """The division of an epoch of `samples` (None if unknown) into `micro_batches` of `batch`
    samples over all ranks, of which `accumulation` make a step."""

    samples: int | None
    batch: int
    accumulation: int
    micro_batches: int
    drop_last: bool = False

    @property
    def per_step(self) -> int:
        """Samples per step, over all ranks."""
        return self.batch * self.accumulation

    @property
    def updates(self) -> int:
        return math.ceil(self.micro_batches / self.accumulation)


@dataclass(frozen=True)
class Leg:
    """The rest of an epoch from sample `start`, as the Trainer's loop counts it: `done` of
    `micro_batches`, a multiple of whole steps, are made. If `start` is not on a step boundary of
    this world, the samples in between are not counted."""

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
        """The number of samples of the epoch that are done after `made` micro batches."""
        return self.start + (made - self.done) * grid.batch


def steps_to_go(place: TrainerPlace, grid: Grid, epochs: float) -> int:
    """The steps from `place` to the end of `epochs` epochs."""
    if place.epoch >= epochs:
        return 0
    leg = Leg.after(place, grid)
    rest = leg.updates - leg.done // grid.accumulation
    if epochs < place.epoch + 1:  # training ends within this epoch
        assert grid.samples is not None  # fractional epochs need a known length
        part = (epochs - place.epoch) * grid.samples - place.samples
        return min(rest, max(0, math.ceil(part / grid.per_step)))
    return rest + math.ceil((epochs - place.epoch - 1) * grid.updates)


class PlacedSampler(Sampler[int]):
    """The indices of the sampler `inner`; after `continue_at` the next iteration resumes within an
    epoch."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.draws = FetchObserver()
        self.batch = 0
        """Samples of a micro batch over all ranks, if this process fetches them; else 0."""
        self._drawn_from: torch.Tensor | None = None
        self._left_out = range(0)
        self._order: torch.Tensor | None = None

    def continue_at(self, place: TrainerPlace, skipped: int) -> None:
        """Leave out the samples up to `place`, of which the loop itself skips the first
        `skipped`."""
        self._left_out, self._order = range(skipped, place.samples), place.order

    def order(self, begun: bool) -> torch.Tensor | None:
        """The generator's state from which this epoch's order was or will be drawn; None if the
        sampler seeds its generator for each epoch."""
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
            self.draws.fetch(given // self.batch + 1)  # the incomplete last one, or the end

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
    """Tracks the place of training in the data. Call `take` and `cut` first, then `continue_at` in
    a resumed run."""

    def __init__(self, world: World, accumulation: int, seed: int) -> None:
        self.world, self._seed = world, seed
        self._sampler: PlacedSampler | None = None
        self._loader: Any = None
        self._worker_draws: WorkerDraws | None = None
        self.grid = Grid(None, 1, accumulation, 1)
        """The division of an epoch."""
        self._epoch, self._made = 0, 0
        self._leg, self._continued = Leg(0, 0, 1, 1), False
        self.left_epoch: int | None = None
        """The epoch whose rest is skipped, if any."""

    def take(self, loader: Any) -> None:
        """Set the training loader, and wrap its sampler so that it can resume within an epoch."""
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
        """Resume from `place`; the rest of its epoch. `resume` restores the random generators, and
        is called after the fetch of the prefetched micro batch, if there was one. Raises
        `UsageError`, on all ranks alike, if this loader can resume only on the same number of
        ranks."""
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
        """Begin or continue `epoch`; the counts for the Trainer's loop."""
        if not self._continued or epoch != self._epoch:
            self._epoch, self._made = epoch, 0
            self._leg = Leg(0, 0, self.grid.micro_batches, self.grid.updates)
        self._continued = False
        if self._worker_draws is not None:
            self._worker_draws.begin(epoch, self._leg.done)
        return self._leg

    def leave_epoch(self, left: bool) -> None:
        """If `left`, skip the rest of the epoch that was to be continued."""
        if left and self._leg.start > 0:
            self.left_epoch = self._epoch

    def step(self) -> None:
        self._made = min(self._made + self.grid.accumulation, self._leg.micro_batches)

    @property
    def epoch_is_over(self) -> bool:
        """Whether the last step was the last one of its epoch."""
        return self._made >= self._leg.micro_batches

    def place(self, epoch_is_over: bool) -> TrainerPlace:
        """The present place; the start of the next epoch if this one is over."""
        epoch, samples = self._epoch + 1, 0
        if not epoch_is_over:
            epoch, samples = self._epoch, self._leg.samples(self._made, self.grid)
        place = TrainerPlace(epoch, samples, self.grid.per_step, self.world.size)
        if self._sampler is None:
            return place
        order = self._sampler.order(begun=samples > 0)
        return replace(place, order=order, draws=self._sampler.draws.before_fetch)


def _is_bound_to_ranks(loader: Any, sampler: Any) -> bool:
    """Whether the sampler yields only one rank's share, or yields no single samples."""
    if isinstance(loader.dataset, IterableDataset) or isinstance(loader, DataLoaderDispatcher):
        return True
    return sampler is None or hasattr(sampler, "num_replicas")


def _why_bound(sampler: PlacedSampler | None) -> str:
    """Why another number of ranks would get other samples; empty if it would not."""
    if sampler is None:
        return "its loader's order depends on the ranks"
    if hasattr(sampler.inner, "repeat_count"):
        return "what its trainer generates depends on the ranks"
    if type(sampler.inner) is RandomSampler:
        return "with use_seedable_sampler=False the order depends on the ranks"
    return ""


def _divide(samples: int, batch: int, drop_last: bool) -> int:
    return samples // batch if drop_last else math.ceil(samples / batch)


EXTRA_STATE = (
    "_step",
    "_buffered_inputs",
    "_metrics",
    "_pending_metrics",
    "_total_train_tokens",
    "_entropy_window_stats",
    "_last_world_entropy",
)
"""Attributes of TRL's trainers that persist across steps but are not in their checkpoints."""


@dataclass(frozen=True)
class DueWork:
    """The work that the Trainer had not done yet after the step of a checkpoint, in its order.
    `ends`: a callback had ended the training; `grad_norm` and `learning_rate` are for the log."""

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
    """State of a rank's loop besides the Trainer's own.

    `loss` is the sum of the losses since the last log, after step `logged`, and `total_loss` of
    those before. `first_step` is the run's first step, `seconds` its training time, `kept` the
    steps that the Trainer itself saved. `callbacks` are the states of its callbacks, with their
    class, in order; `held` is the extra state of TRL's trainers."""

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
        assert self.place is not None  # only checkpoints of earlier versions have none
        nested = {"place": vars(self.place), "due": vars(self.due)}
        torch.save(vars(self) | nested, _file(folder, rank))

    @classmethod
    def load(cls, folder: Path, rank: int, ranks: int) -> TrainerProgress | None:
        """This rank's progress in a checkpoint, or for another number of ranks rank 0's with the
        mean loss. None for a checkpoint of an earlier version."""
        if not _file(folder, 0).exists():
            return None
        first = cls._read(folder, 0)
        assert first.place is not None  # every saved one has a place
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
    """The states of the callbacks that have one, each with its class name, in order."""
    return tuple((type(each).__name__, each.state()) for each in _stateful(trainer))


def restore_callbacks(trainer: Trainer, states: tuple[tuple[str, dict[str, Any]], ...]) -> None:
    """Restore each callback from the next state of its class."""
    left = list(states)
    for callback in _stateful(trainer):
        mine = next(
            (at for at, (name, _) in enumerate(left) if name == type(callback).__name__), None
        )
        if mine is not None:
            for name, value in left.pop(mine)[1].get("attributes", {}).items():
                setattr(callback, name, value)


def extra_state(trainer: Trainer) -> dict[str, Any]:
    return {name: _plain(getattr(trainer, name)) for name in EXTRA_STATE if hasattr(trainer, name)}


def restore_extra_state(trainer: Trainer, held: dict[str, Any]) -> None:
    known = {name: held[name] for name in held if hasattr(trainer, name)}
    _refill(vars(trainer), send_to_device(known, trainer.args.device))


def _stateful(trainer: Trainer) -> list[Any]:
    return [
        each for each in trainer.callback_handler.callbacks if isinstance(each, ExportableState)
    ]


def _plain(value: Any) -> Any:
    """Convert to types that `torch.load(weights_only=True)` accepts."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple | deque):
        return [_plain(item) for item in value]
    return value.item() if isinstance(value, np.generic) else value


def _refill(into: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Update `into` with `values`, recursively: nested dicts keep their identity."""
    for key, value in values.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _refill(into[key], value)
        else:
            into[key] = value


def _file(folder: Path, rank: int) -> Path:
    return folder / f"kempner-{rank}.pt"
