"""The training data of a Lightning `Trainer`, with a place that a checkpoint can hold.

`hold` takes the place of the step in which Lightning injects its `DistributedSampler`. What the
user's `DataLoader` reads, how and in how many workers, stays; its order becomes one that a resume
draws again, and what its samples draw at random follows from the batch.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any, Protocol

import numpy as np
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from kempner.data.serve.sampler import ResumableBatchSampler, ResumableDataLoader
from kempner.run.process.exit_codes import UsageError
from kempner.run.process.worker_process import born_deaf
from kempner.training.compute.seeds import seed_for, set_rng


def seed_generators(seed: int, step: int, stage: int, rank: int) -> None:
    """Seed the global generators of torch, NumPy and `random`."""
    set_rng(seed, step, stage, rank)
    number = seed_for(seed, step, stage, rank)
    random.seed(number)
    np.random.seed(number % 2**32)


@contextmanager
def own_draws(seed: int) -> Iterator[None]:
    """What is drawn in here follows from `seed`, and changes no draw of the program."""
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.default_generator.manual_seed(seed)
    try:
        yield
    finally:
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


class Order(Protocol):
    """In which order a loader's batches come, and how many of them the loop has received."""

    fits_any_world: bool
    """Whether its place is one for any number of ranks."""

    def __iter__(self) -> Iterator[Any]:
        """The batches that are left of the epoch, as indices."""

    def __len__(self) -> int:
        """Batches of the epoch."""

    def set_epoch(self, epoch: int) -> None:
        """The next iterator yields what is left of this epoch."""

    def advance(self) -> None:
        """The loop has received one more."""

    def left(self) -> int:
        """Batches that are left of the epoch."""

    def state_dict(self) -> dict[str, Any]:
        """Where it stands."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there. Raises `DataError` if that is a place in other data."""


class SampleOrder:
    """kempner's permutation, whose place is a number of samples: it fits any number of ranks."""

    fits_any_world = True

    def __init__(self, sampler: ResumableBatchSampler, seed: int) -> None:
        self._sampler, self._seed = sampler, seed

    def __iter__(self) -> Iterator[Any]:
        shares: Any = iter(self._sampler)
        for share in shares:
            at = shares.state_dict()["position"]
            yield [seed_for(self._seed, at, 0, self._sampler.rank), *share]

    def __len__(self) -> int:
        return len(self._sampler)

    def set_epoch(self, epoch: int) -> None:
        self._sampler.set_epoch(epoch)

    def advance(self) -> None:
        self._sampler.advance()

    def left(self) -> int:
        return self._sampler.batches.batches_left(self._sampler.position)

    def state_dict(self) -> dict[str, Any]:
        return self._sampler.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)


class DrawnOrder:
    """The order of any other sampler, drawn anew for each epoch from the seed and the epoch.

    Its place is a number of batches, so that it fits only as many ranks.
    """

    fits_any_world = False

    def __init__(self, indices: Any, seed: int, rank: int) -> None:
        self._indices, self._seed, self._rank = indices, seed, rank
        self._epoch = self._received = 0

    def __iter__(self) -> Iterator[Any]:
        if self._received >= len(self):
            self._epoch, self._received = self._epoch + 1, 0
        epoch, begin = self._epoch, self._received
        with own_draws(seed_for(self._seed, epoch, 0, 0)):
            drawn = list(self._indices)
        for number, batch in enumerate(drawn[begin:], begin):
            indices = batch if isinstance(batch, list | tuple) else [batch]
            yield [seed_for(self._seed, epoch, number, self._rank), *indices]

    def __len__(self) -> int:
        return len(self._indices)

    def set_epoch(self, epoch: int) -> None:
        if epoch > self._epoch:
            self._epoch, self._received = epoch, 0
        for sampler in (self._indices, getattr(self._indices, "sampler", None)):
            if (tell := getattr(sampler, "set_epoch", None)) is not None:
                tell(epoch)

    def advance(self) -> None:
        self._received += 1

    def left(self) -> int:
        return len(self) - self._received

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "received": self._received}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.set_epoch(state["epoch"])
        self._received = state["received"]


class HeldLoader:
    """The user's loader with an `Order` for its batches; all else of it is the user's."""

    def __init__(self, loader: DataLoader[Any], order: Order) -> None:
        self._loader, self._order = copy.copy(loader), order
        # A loader lets no one change these once it is made.
        object.__setattr__(self._loader, "batch_sampler", order)
        object.__setattr__(self._loader, "dataset", _SeededSamples(loader.dataset))

    def __iter__(self) -> Iterator[Any]:
        with born_deaf() if self._loader.num_workers else nullcontext():
            batches = iter(self._loader)
        return self._handed_over(batches)

    def _handed_over(self, batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            self._order.advance()
            yield batch

    def __len__(self) -> int:
        return len(self._order)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    @property
    def dataset(self) -> Any:
        """The user's own."""
        return self._loader.dataset._dataset  # type: ignore[attr-defined]

    @property
    def fits_any_world(self) -> bool:
        """See `Order`."""
        return self._order.fits_any_world

    def skip(self, batches: int) -> None:
        """Begin so many batches later."""
        for _ in range(batches):
            self._order.advance()

    @property
    def _iterator(self) -> Any:
        return self._loader._iterator

    @_iterator.setter
    def _iterator(self, iterator: Any) -> None:  # Lightning shuts down persistent workers so
        self._loader._iterator = iterator

    def set_epoch(self, epoch: int) -> None:
        """See `Order`."""
        self._order.set_epoch(epoch)

    def left(self) -> int:
        """See `Order`."""
        return self._order.left()

    def state_dict(self) -> dict[str, Any]:
        """See `Order`."""
        return self._order.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """See `Order`."""
        self._order.load_state_dict(state)


class _SeededSamples:
    """The user's data, whose samples may draw random numbers: those follow from the batch."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset

    def __getitems__(self, batch: list[Any]) -> list[Any]:
        seed, *indices = batch
        with own_draws(seed):
            if callable(together := getattr(self._dataset, "__getitems__", None)):
                found: list[Any] = together(indices)
                return found
            return [self._dataset[index] for index in indices]

    def __len__(self) -> int:
        return len(self._dataset)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_dataset":  # as pickle asks for
            raise AttributeError(name)
        return getattr(self.__dict__["_dataset"], name)


class StatefulLoader:
    """A loader that tells its own state, less the batches that Lightning has fetched ahead."""

    def __init__(self, loader: Any, ahead: Callable[[], int]) -> None:
        self._loader, self._ahead = loader, ahead
        self._before: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            self._before = copy.deepcopy(self._loader.state_dict())
            try:
                batch = next(batches)
            except StopIteration:
                return
            yield batch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    def state_dict(self) -> dict[str, Any]:
        """Of the batches that the loop has received: at most one is fetched ahead."""
        if self._ahead() and self._before is not None:
            return self._before
        state: dict[str, Any] = self._loader.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to the place of a `state_dict()`."""
        self._loader.load_state_dict(state)


def hold(
    loader: Any, seed: int, rank: int, inject: Callable[[Any], Any], ahead: Callable[[], int]
) -> Any:
    """The same batches from a loader whose place a checkpoint can hold.

    `inject` gives a loader Lightning's sampler for this rank, `ahead` is how many batches Lightning
    has fetched ahead. Raises `UsageError` for what cannot be brought back to a place.
    """
    if isinstance(loader, ResumableDataLoader | HeldLoader | StatefulLoader):
        return loader
    if hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict"):
        loader = inject(loader)
        return loader if _has_length(loader) else StatefulLoader(loader, ahead)
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        what = loader.dataset if isinstance(loader, DataLoader) else loader
        raise UsageError(
            f"Survive cannot bring {type(what).__name__} back to its place in the data: give "
            "trainer.fit a DataLoader of a data set with a length, or torchdata's "
            "StatefulDataLoader"
        )
    if (sampler := _resumable(loader, seed)) is not None:
        return HeldLoader(loader, SampleOrder(sampler, seed))
    if loader.batch_sampler is None:
        raise UsageError(
            "Survive cannot bring a DataLoader(batch_size=None) back to its place in the data: "
            "give it a batch_size, or take torchdata's StatefulDataLoader"
        )
    loader = inject(loader)
    return HeldLoader(loader, DrawnOrder(loader.batch_sampler, seed, rank))


def _resumable(loader: DataLoader[Any], seed: int) -> ResumableBatchSampler | None:
    """The sampler that takes the place of torch's own; None where the user has chosen another."""
    batches, sampler, data = loader.batch_sampler, loader.sampler, loader.dataset
    if type(batches) is not BatchSampler or not isinstance(batches.batch_size, int):
        return None
    own: dict[str, Any] = {"drop_last": batches.drop_last}
    match sampler:
        case SequentialSampler():
            own["seed"] = None
        case RandomSampler() if not sampler.replacement and sampler.num_samples == len(data):  # type: ignore[arg-type]
            own["seed"] = seed
        case DistributedSampler():
            own |= {"seed": seed if sampler.shuffle else None, "rank": sampler.rank}
            own["num_replicas"] = sampler.num_replicas
        case _:
            return None
    return ResumableBatchSampler(data, batches.batch_size, **own)  # type: ignore[arg-type]


def _has_length(loader: Any) -> bool:
    try:
        len(loader)
    except (TypeError, NotImplementedError):
        return False
    return True
