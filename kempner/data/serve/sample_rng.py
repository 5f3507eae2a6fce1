"""Random numbers of a data set, as a function of a sample's place: whatever draws them, and where.

A worker of a loader, or the loop itself, draws a sample's augmentation from torch's, NumPy's and
Python's generators. Each sample begins with these seeded by its place in the order, so that a
resumed run, another number of workers and another number of ranks draw the same for it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
import xxhash
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, get_worker_info

Generators: TypeAlias = Sequence[Any]  # of torch, NumPy or Python


def key(*words: object) -> int:
    """A seed of 63 bits, another one for other words."""
    return xxhash.xxh3_64_intdigest(repr(words).encode()) >> 1


def generators_of(owner: object) -> Generators:
    kinds = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
    return [value for value in _attributes(owner).values() if isinstance(value, kinds)]


def seed_all(seed: int, more: Generators = ()) -> None:
    """Seed the generators of this process that a data set may draw from, and `more`."""
    torch.default_generator.manual_seed(seed)  # CUDA's are the loop's
    np.random.seed(seed & 0xFFFFFFFF)
    random.seed(seed)
    for generator in more:
        if isinstance(generator, torch.Generator):
            generator.manual_seed(seed)
        elif isinstance(generator, np.random.Generator):
            kind = type(generator.bit_generator)
            generator.bit_generator.state = kind(seed).state
        else:
            generator.seed(seed & 0xFFFFFFFF)


@contextmanager
def kept(more: Generators = ()) -> Iterator[None]:
    """What is drawn in this block changes nothing that is drawn after it."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    others = [_state(generator) for generator in more]
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
        for generator, state in zip(more, others, strict=True):
            _set_state(generator, state)


class SampleRequest(NamedTuple):
    """What a loader asks its data set for: an index, and the seed of what that draws."""

    index: Any
    seed: int


class DrawnDataset(Dataset[Any]):
    """A map-style data set that draws for each sample what its place says; see above."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        self._generators = generators_of(dataset)
        self._pure = is_pure(dataset)

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, item: SampleRequest) -> Any:
        self._begin(item.seed)
        return self.dataset[item.index]

    def __getitems__(self, items: Sequence[SampleRequest]) -> list[Any]:
        """The samples of a batch; then what collates them draws by the place of the first."""
        together = getattr(self.dataset, "__getitems__", None)
        if callable(together):
            self._begin(items[0].seed)
            samples: list[Any] = together([item.index for item in items])
        else:
            samples = [self[item] for item in items]
        seed_all(key("batch", items[0].seed))
        return samples

    def _begin(self, seed: int) -> None:
        if not self._pure:
            seed_all(seed, self._generators)


def show_own_dataset() -> None:
    """In a worker: its `worker_init_fn` sees the data set of the user."""
    info = get_worker_info()
    if info is not None and isinstance(info.dataset, DrawnDataset):
        object.__setattr__(info, "dataset", info.dataset.dataset)  # it is frozen


def is_pure(dataset: object) -> bool:
    """Whether it is known that a data set draws nothing: then seeding would only cost time."""
    if isinstance(dataset, Subset):
        return is_pure(dataset.dataset)
    if isinstance(dataset, ConcatDataset):
        return all(map(is_pure, dataset.datasets))
    return type(dataset) in (TensorDataset, list, tuple, range)


def _attributes(owner: object) -> Mapping[str, object]:
    return getattr(owner, "__dict__", {})


def _state(generator: Any) -> Any:
    match generator:
        case np.random.Generator():
            return generator.bit_generator.state
        case random.Random():
            return generator.getstate()
    return generator.get_state()


def _set_state(generator: Any, state: Any) -> None:
    match generator:
        case np.random.Generator():
            generator.bit_generator.state = state
        case random.Random():
            generator.setstate(state)
        case _:
            generator.set_state(state)
