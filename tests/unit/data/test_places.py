"""Where a loader stands comes back: each kind, after each batch, with other workers and ranks.

A run is read to its end, undisturbed; another one is cut after each batch in turn, and goes on with
a new loader from what a checkpoint would hold. Both must have read and drawn the same.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import PartialState
from accelerate.data_loader import prepare_data_loader
from datasets import Dataset as HubDataset
from datasets import IterableDataset as HubStream
from lightning.fabric.wrappers import _FabricDataLoader
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from kempner.data.serve.places import Supply, supply_of
from kempner.data.serve.sampler import (
    ResumableBatchSampler,
    ResumableDataLoader,
    ResumableSampler,
)
from kempner.run.process.exit_codes import MismatchError, UsageError

SAMPLES, BATCH, SEED = 22, 4, 5
READ = 2 * -(-SAMPLES // BATCH) + 2
"""Batches: two epochs, and the beginning of a third."""


class Augmented(Dataset[Any]):
    """Each sample is its number, and what was drawn for it."""

    def __init__(self, samples: int = SAMPLES) -> None:
        self.samples, self.own = samples, np.random.default_rng(3)

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> list[float]:
        draws = (torch.rand(()).item(), np.random.rand(), random.random(), self.own.random())
        return [float(index), *draws]


class Masked:
    """Collates, and draws as a collator of a language model does."""

    def __call__(self, samples: list[Any]) -> list[Any]:
        return [*samples, torch.rand(2).tolist()]


class WithGenerator:
    """A sampler of a user's, with a generator of its own."""

    def __init__(self) -> None:
        self.generator = torch.Generator().manual_seed(11)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        yield from torch.randperm(SAMPLES, generator=self.generator).tolist()


class ByEpoch:
    """Batches of a user's, of unequal lengths."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        order = np.random.default_rng(self.epoch).permutation(15).tolist()
        yield from (order[n * (n - 1) // 2 : n * (n + 1) // 2] for n in range(1, 6))


class Counting(IterableDataset[Any]):
    """A stream with a state."""

    def __init__(self) -> None:
        self.at = 0

    def __iter__(self) -> Iterator[list[float]]:
        while self.at < SAMPLES:
            self.at += 1
            yield [float(self.at - 1), torch.rand(()).item(), random.random()]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def hub_stream(shards: int = 2) -> HubStream:
    columns = {"n": [float(n) for n in range(SAMPLES)]}
    return HubDataset.from_dict(columns).to_iterable_dataset(num_shards=shards)


def plain(**options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(), **{"batch_size": BATCH, "collate_fn": list} | options)


def resumable(**options: Any) -> DataLoader[Any]:
    data = Augmented()
    sampler = ResumableBatchSampler(data, BATCH, seed=4, **options)
    return ResumableDataLoader(data, batch_sampler=sampler, collate_fn=list)


def in_batches(sampler: BatchSampler) -> DataLoader[Any]:
    """As `datasets` advises: lists of indices, and a data set that takes them."""
    data = HubDataset.from_dict({"n": [float(n) for n in range(SAMPLES)]})
    return DataLoader(data, sampler=sampler, batch_size=None)


def accelerated(loader: DataLoader[Any], rank: int = 0, ranks: int = 1) -> Any:
    """As `Accelerator.prepare` makes it."""
    PartialState(cpu=True)
    return prepare_data_loader(loader, num_processes=ranks, process_index=rank, put_on_device=False)


KINDS: dict[str, Callable[[], Any]] = {
    "in order": plain,
    "shuffled": lambda: plain(shuffle=True),
    "drop_last": lambda: plain(shuffle=True, drop_last=True),
    "generator": lambda: plain(shuffle=True, generator=torch.Generator().manual_seed(1)),
    "masked": lambda: plain(shuffle=True, collate_fn=Masked()),
    "one by one": lambda: plain(shuffle=True, batch_size=None, collate_fn=None),
    "subset": lambda: plain(sampler=SubsetRandomSampler(range(0, SAMPLES, 2))),
    "weighted": lambda: plain(sampler=WeightedRandomSampler([1.0] * 9 + [5.0] * 4, 15)),
    "with replacement": lambda: plain(
        sampler=RandomSampler(range(SAMPLES), replacement=True, num_samples=13)
    ),
    "distributed": lambda: plain(sampler=DistributedSampler(range(SAMPLES), 1, 0, seed=2)),
    "own sampler": lambda: plain(sampler=WithGenerator()),
    "own batches": lambda: plain(batch_sampler=ByEpoch(), batch_size=1),
    "lists of indices": lambda: in_batches(
        BatchSampler(RandomSampler(range(SAMPLES)), BATCH, drop_last=False)
    ),
    "stateful": lambda: StatefulDataLoader(
        Augmented(), batch_size=BATCH, shuffle=True, collate_fn=list
    ),
    "kempner's loader": resumable,
    "kempner's loader, infinite": lambda: resumable(infinite=True),
    "kempner's sampler": lambda: plain(sampler=ResumableSampler(range(SAMPLES), seed=9)),
    "stream": lambda: DataLoader(Counting(), batch_size=BATCH, collate_fn=list),
    "stateful stream": lambda: StatefulDataLoader(Counting(), batch_size=BATCH, collate_fn=list),
    "hub": lambda: DataLoader(hub_stream(), batch_size=BATCH),
    "accelerated": lambda: accelerated(plain(shuffle=True)),
    "accelerated, seedable": lambda: prepare_data_loader(
        plain(shuffle=True), num_processes=1, put_on_device=False, use_seedable_sampler=True
    ),
    "fabric": lambda: _FabricDataLoader(plain(shuffle=True)),
    "hub, alone": lambda: hub_stream(),
    "hub, shuffled": lambda: DataLoader(
        hub_stream().shuffle(seed=3, buffer_size=6), batch_size=BATCH
    ),
    "hub, stateful": lambda: StatefulDataLoader(hub_stream(), batch_size=BATCH),
}

WITH_WORKERS: dict[str, Callable[[int], Any]] = {
    "shuffled": lambda workers: plain(shuffle=True, num_workers=workers),
    "persistent": lambda workers: plain(
        shuffle=True, num_workers=workers, persistent_workers=workers > 0
    ),
    "masked": lambda workers: plain(collate_fn=Masked(), num_workers=workers),
    "stateful": lambda workers: StatefulDataLoader(
        Augmented(), batch_size=BATCH, shuffle=True, collate_fn=list, num_workers=workers
    ),
}


def opened(data: Any, place: tuple[int, int] = (0, 1)) -> Supply:
    torch.rand(random.randrange(9))  # what a program draws before
    return supply_of(data, SEED, place)


def read(supply: Supply, batches: int) -> list[Any]:
    """What a loop gets that itself draws as well."""
    got = []
    for _ in range(batches):
        got.append(supply.take())
        torch.rand(3), np.random.rand(), random.random()
    return got


@pytest.fixture(autouse=True)
def generators() -> Iterator[None]:
    """What other tests draw does not depend on these."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.manual_seed(1)
    yield
    torch.set_rng_state(before[0])
    np.random.set_state(before[1])
    random.setstate(before[2])


@pytest.mark.parametrize("kind", KINDS)
def test_a_loop_goes_on_with_the_next_sample_wherever_it_was_cut(kind: str) -> None:
    make = KINDS[kind]
    batches = 2 * SAMPLES + 3 if kind in ("one by one", "hub, alone") else READ
    undisturbed = repr(read(opened(make()), batches))
    for cut in range(batches + 1):
        first = opened(make())
        head = read(first, cut)
        rest = opened(make())
        rest.load_state_dict(first.state_dict())
        assert repr(head + read(rest, batches - cut)) == undisturbed, f"cut after {cut}"


@pytest.mark.parametrize("kind", WITH_WORKERS)
def test_another_number_of_workers_reads_and_draws_the_same(kind: str) -> None:
    make = WITH_WORKERS[kind]
    undisturbed = repr(read(opened(make(0)), READ))
    for cut, before, after in ((1, 2, 0), (6, 0, 2), (7, 1, 2)):
        first = opened(make(before))
        head = read(first, cut)
        rest = opened(make(after))
        rest.load_state_dict(first.state_dict())
        first.close()
        assert repr(head + read(rest, READ - cut)) == undisturbed
        rest.close()


def test_epochs_have_orders_of_their_own_and_a_seed_gives_others() -> None:
    supply = opened(KINDS["shuffled"]())
    per_epoch: dict[int, list[float]] = {}
    for batch, epoch in read(supply, 18):
        per_epoch.setdefault(epoch, []).extend(sample[0] for sample in batch)
    assert [*per_epoch] == [0, 1, 2]
    assert all(sorted(order) == [*range(SAMPLES)] for order in per_epoch.values())
    assert len({tuple(order) for order in per_epoch.values()}) == 3
    other = supply_of(KINDS["shuffled"](), SEED + 1, (0, 1))
    assert [sample[0] for sample in other.take()[0]] != per_epoch[0][:BATCH]


EVEN = 24
"""Samples that any of these ranks divide, so that each epoch ends with the same batch."""


def even(size: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(Augmented(EVEN), batch_size=size, collate_fn=list, **options)


SHARED: dict[str, Callable[[int, int, int], Any]] = {
    "accelerated": lambda rank, ranks, size: accelerated(even(size, shuffle=True), rank, ranks),
    "in order": lambda rank, ranks, size: even(size),
    "shuffled": lambda rank, ranks, size: even(size, shuffle=True),
    "distributed": lambda rank, ranks, size: even(
        size, sampler=DistributedSampler(range(EVEN), ranks, rank, seed=6)
    ),
    "kempner's": lambda rank, ranks, size: even(
        size,
        sampler=ResumableSampler(range(EVEN), num_replicas=ranks, rank=rank, seed=6),
    ),
}


@pytest.mark.parametrize("kind", SHARED)
@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (2, 4)])
def test_another_number_of_ranks_neither_repeats_nor_misses_a_sample(
    kind: str, before: int, after: int
) -> None:
    """Global batches of four, whatever the ranks: the same samples in each step."""

    def world(ranks: int) -> list[Supply]:
        make = SHARED[kind]
        return [opened(make(rank, ranks, 4 // ranks), (rank, ranks)) for rank in range(ranks)]

    def step(supplies: list[Supply]) -> list[list[float]]:
        return sorted(sample for supply in supplies for sample in supply.take()[0])

    whole = world(before)
    undisturbed = [step(whole) for _ in range(EVEN // 2)]
    seen = Counter(sample[0] for samples in undisturbed for sample in samples)
    assert set(seen.values()) == {2}
    assert len(seen) == EVEN
    for cut in range(len(undisturbed)):
        first = world(before)
        head = [step(first) for _ in range(cut)]
        rest = world(after)
        for supply in rest:
            assert supply.shared
            supply.load_state_dict(first[0].state_dict())
        assert head + [step(rest) for _ in undisturbed[cut:]] == undisturbed


class Endless:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


class Moody(WithGenerator):
    def __init__(self) -> None:
        self.calls = 0

    def __iter__(self) -> Iterator[int]:
        self.calls += 1
        yield from np.random.default_rng(self.calls).permutation(SAMPLES).tolist()


class Bare(IterableDataset[Any]):
    def __iter__(self) -> Iterator[int]:
        return iter(range(SAMPLES))


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    "generator": (lambda: (n for n in range(3)), "a generator ends once it was read"),
    "iterator": (lambda: iter(plain()), "ends once it was read"),
    "number": (lambda: 3, "the place in a int cannot be saved"),
    "stream": (lambda: DataLoader(Bare()), "the place in the stream Bare cannot be saved"),
    "workers": (
        lambda: DataLoader(Counting(), num_workers=2),
        "does not tell how far its 2 workers have read the stream Counting",
    ),
    "endless": (lambda: plain(sampler=Endless()), "Endless has no length"),
    "moody": (lambda: plain(sampler=Moody()), "Moody does not give the same order twice"),
    "empty": (lambda: plain(sampler=SubsetRandomSampler([])), "there is no sample to draw"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_has_no_place_is_refused_in_one_sentence(kind: str) -> None:
    make, words = REFUSED[kind]
    with pytest.raises(UsageError, match=words) as refused:
        opened(make())
    assert "\n" not in str(refused.value)


def test_a_place_in_other_data_is_refused() -> None:
    state = opened(plain()).state_dict()
    with pytest.raises(MismatchError, match="data of 22 samples, this run's has 21"):
        opened(DataLoader(Augmented(21))).load_state_dict(state)
    with pytest.raises(MismatchError, match="the samples of data in another order"):
        opened(plain(shuffle=True)).load_state_dict(state)


def test_a_stream_with_other_workers_is_refused_before_it_is_read() -> None:
    def make(workers: int) -> StatefulDataLoader[Any]:
        return StatefulDataLoader(hub_stream(), batch_size=BATCH, num_workers=workers)

    first = opened(make(2))
    read(first, 2)
    state = first.state_dict()
    first.close()
    with pytest.raises(MismatchError, match="num_workers=2 and the stream has num_workers=1 now"):
        opened(make(1)).load_state_dict(state)


def test_a_worker_sees_the_users_own_data_set() -> None:
    loader = plain(num_workers=1, worker_init_fn=_note_dataset)
    supply = opened(loader)
    assert len(supply.take()[0]) == BATCH
    supply.close()


def _note_dataset(worker: int) -> None:
    info = torch.utils.data.get_worker_info()
    assert info is not None
    assert type(info.dataset) is Augmented


def test_in_order_is_the_order_of_the_data() -> None:
    sampler = SequentialSampler(range(SAMPLES))
    supply = opened(plain(sampler=sampler))
    assert [sample[0] for sample in supply.take()[0]] == [0.0, 1.0, 2.0, 3.0]
