"""Samplers go on at their position, in any world, and only the loop moves it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import islice

import pytest
from data_sets import WORKERS, Numbers, expected
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

import kempner
from kempner.data.serve.sampler import (
    ResumableBatchSampler,
    ResumableDataLoader,
    ResumableSampler,
)
from kempner.run.process.exit_codes import MismatchError, UsageError


def merged(parts: list[list[int]]) -> list[int]:
    """What the ranks take, in the global order."""
    columns = max(map(len, parts))
    return [part[row] for row in range(columns) for part in parts if row < len(part)]


@pytest.mark.parametrize("options", WORKERS)
def test_a_loop_over_steps_goes_on_in_the_middle_of_an_epoch(options: dict[str, int]) -> None:
    """The position follows from the step; a plain DataLoader is enough."""
    n, batch, micro, ranks = 13, 2, 3, 2

    def train(done: int, until: int) -> list[int]:
        parts = []
        for rank in range(ranks):
            numbers = Numbers(n)
            sampler = ResumableBatchSampler(
                numbers, batch, num_replicas=ranks, rank=rank, infinite=True
            )
            sampler.set_position(done * batch * micro * ranks)
            batches = iter(DataLoader(numbers, batch_sampler=sampler, **options))
            taken = [
                index
                for _ in range(done, until)
                for micro_batch in islice(batches, micro)
                for index in micro_batch.tolist()
            ]
            parts.append(taken)
            del batches
        return merged(parts)

    assert train(0, 3) + train(3, 5) == train(0, 5) == expected(n, 0, 5 * batch * micro * ranks)


def ranks_of(n: int, world: int, **options: object) -> list[ResumableBatchSampler]:
    return [
        ResumableBatchSampler(range(n), num_replicas=world, rank=rank, **options)
        for rank in range(world)
    ]


@given(
    n=st.integers(1, 60),
    worlds=st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(0, 12)), min_size=1, max_size=4
    ),
)
def test_other_worlds_go_on_in_the_same_order(n: int, worlds: list[tuple[int, int, int]]) -> None:
    state, seen = {"position": 0}, []
    for world, batch_size, batches in worlds:
        samplers = ranks_of(n, world, batch_size=batch_size)
        for sampler in samplers:
            sampler.load_state_dict(state)
        left = batches
        while left:
            parts = [list(islice(sampler, left)) for sampler in samplers]
            assert len({len(part) for part in parts}) == 1
            for rows in zip(*parts, strict=True):
                seen += merged([list(row) for row in rows])
            left -= len(parts[0])
            for sampler in samplers:
                sampler.advance(len(parts[0]))
        states = [sampler.state_dict() for sampler in samplers]
        assert states == [states[0]] * world
        state = states[0]
    assert state["position"] == len(seen)
    assert seen == expected(n, 0, len(seen))


@pytest.mark.parametrize(("before", "after"), [(4, 3), (2, 1)])
def test_a_global_batch_is_cut_over_fewer_ranks(before: int, after: int) -> None:
    n, size = 20, 8
    seen = []
    for world, position in ((before, 0), (after, 8)):
        samplers = ranks_of(n, world, global_batch_size=size, infinite=True)
        for sampler in samplers:
            sampler.set_position(position)
        parts = [next(iter(sampler)) for sampler in samplers]
        assert sum(map(len, parts)) == size
        assert max(map(len, parts)) == samplers[0].batch_size
        seen += merged(parts)
    assert seen == expected(n, 0, 2 * size)


@given(
    n=st.integers(1, 60),
    world=st.integers(1, 4),
    batch_size=st.integers(1, 5),
    epochs=st.integers(1, 3),
    stop=st.integers(0, 100),
)
def test_a_sampler_of_single_samples_is_cut_by_the_loader(
    n: int, world: int, batch_size: int, epochs: int, stop: int
) -> None:
    seen: list[int] = []
    state = {"position": 0}
    for _ in range(epochs * 2):  # whole epochs, or up to the stop
        samplers = [
            ResumableSampler(range(n), num_replicas=world, rank=rank) for rank in range(world)
        ]
        for sampler in samplers:
            sampler.load_state_dict(state)
        loaders = [DataLoader(range(n), batch_size, sampler=sampler) for sampler in samplers]
        for rows in islice(zip(*loaders, strict=True), stop):
            seen += merged([row.tolist() for row in rows])
            for sampler, row in zip(samplers, rows, strict=True):
                sampler.advance(len(row))
        state = samplers[-1].state_dict()
    assert state["position"] == len(seen)
    assert seen == expected(n, 0, len(seen))


def test_a_long_sampler_goes_through_all_its_chunks() -> None:
    n = 5000
    sampler = ResumableSampler(range(n), num_replicas=2, rank=1, seed=3)
    assert len(sampler) == 2500
    assert list(sampler) == expected(n, 0, n, seed=3)[1::2]
    assert list(ResumableSampler(range(n), seed=None)) == list(range(n))


def test_epochs_without_telling_the_position() -> None:
    """`set_epoch` alone, as with torch's DistributedSampler."""
    sampler = ResumableBatchSampler(range(10), 4)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        assert [i for batch in batches for i in batch] == expected(10, epoch * 10, epoch * 10 + 10)
        assert sampler.position_after(2) == epoch * 10 + 8
        assert sampler.position_after(3) == epoch * 10 + 10


def test_an_epoch_that_is_done_yields_nothing() -> None:
    sampler = ResumableBatchSampler(range(10), 4)
    sampler.load_state_dict({"position": 14})
    trained = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        if epoch:
            trained += list(sampler)
        else:
            with pytest.warns(UserWarning, match="epoch 0 yields nothing: at position 14 of 10"):
                assert list(sampler) == []
    assert [i for batch in trained for i in batch] == expected(10, 14, 30)


def test_what_drop_last_leaves_out_is_behind_the_position() -> None:
    sampler = ResumableBatchSampler(range(10), 4, drop_last=True)
    assert len(sampler) == len(list(sampler)) == 2
    sampler.advance(2)
    assert sampler.position == 10
    sampler.set_position(8)  # as another batch size leaves it
    assert sampler.epoch == 1
    assert [i for batch in sampler for i in batch] == expected(10, 10, 18)
    sampler.set_epoch(0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert list(sampler) == []


def test_an_iterator_is_not_moved_and_moves_nothing() -> None:
    sampler = ResumableBatchSampler(range(10), 2)
    batches = iter(sampler)
    sampler.set_position(6)
    assert next(batches) == expected(10, 0, 2)
    assert sampler.position == 6


def test_an_infinite_sampler_has_no_length() -> None:
    sampler = ResumableBatchSampler(range(10), 4, infinite=True, drop_last=True)
    with pytest.raises(TypeError, match="no length"):
        len(DataLoader(range(10), batch_sampler=sampler))
    taken = [i for batch in islice(sampler, 4) for i in batch]
    assert taken == expected(10, 0, 8) + expected(10, 10, 18)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "either batch_size"),
        ({"batch_size": 2, "global_batch_size": 4}, "either batch_size"),
        ({"batch_size": 0}, "too small"),
        ({"global_batch_size": 1, "num_replicas": 2, "rank": 0}, "too small for 2 ranks"),
        ({"batch_size": 20, "drop_last": True}, "drop_last leaves nothing"),
        ({"batch_size": 1, "rank": 1}, "both num_replicas and rank"),
        ({"batch_size": 1, "rank": 2, "num_replicas": 2}, "rank 2 of 2"),
        ({"batch_size": 1, "seed": -1}, "a seed is an integer"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, int], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        ResumableBatchSampler(range(10), **options)


def test_iterable_data_is_sent_elsewhere() -> None:
    class Endless(IterableDataset[Tensor]):
        def __iter__(self) -> Iterator[Tensor]:
            return iter(())

    with pytest.raises(UsageError, match="StatefulDataLoader"):
        ResumableBatchSampler(Endless(), 4)


def test_the_state_of_other_data_is_refused() -> None:
    state = ResumableBatchSampler(range(10), 4, seed=1).state_dict()
    with pytest.raises(MismatchError, match="samples=10, this run's samples=11"):
        ResumableBatchSampler(range(11), 4, seed=1).load_state_dict(state)
    with pytest.raises(MismatchError, match="seed=1, this run's seed=2"):
        ResumableBatchSampler(range(10), 4, seed=2).load_state_dict(state)
    with pytest.raises(UsageError, match="no position -1"):
        ResumableBatchSampler(range(10), 4).set_position(-1)


def test_the_launcher_says_which_rank_this_is(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ResumableSampler(range(4)).num_replicas == 1
    place = {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}
    for name, value in {"TORCHELASTIC_RUN_ID": "x", **place}.items():
        monkeypatch.setenv(name, str(value))
    sampler = ResumableSampler(range(4))
    assert (sampler.rank, sampler.num_replicas) == (1, 2)
    monkeypatch.delenv("RANK")
    with pytest.raises(UsageError, match=r"does not know which rank this is: .*RANK"):
        ResumableSampler(range(4))


def test_the_samplers_are_public() -> None:
    assert kempner.ResumableBatchSampler is ResumableBatchSampler
    assert kempner.ResumableSampler is ResumableSampler
    assert kempner.ResumableDataLoader is ResumableDataLoader
