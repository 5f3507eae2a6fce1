"""The place of a Trainer in its data: any worlds in turn, and each sample comes once."""

from __future__ import annotations

import math

from accelerate.data_loader import BatchSamplerShard, SkipBatchSampler
from hypothesis import given
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from kempner.integrations.transformers_trainer.state import (
    Grid,
    Leg,
    PlacedSampler,
    TrainerPlace,
    steps_to_go,
)

worlds = st.tuples(st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
"""Ranks, samples of a micro batch of each, and micro batches in a step."""


def grid_of(samples: int, world: tuple[int, int, int], drop_last: bool) -> Grid:
    ranks, share, accumulation = world
    batch = ranks * share
    whole = samples // batch if drop_last else math.ceil(samples / batch)
    return Grid(samples, batch, accumulation, whole, drop_last)


def play(
    place: TrainerPlace, world: tuple[int, int, int], samples: int, drop_last: bool, steps: int
) -> tuple[TrainerPlace, list[int]]:
    """At most `steps` steps of the epoch, as Accelerate deals them out; the place after them."""
    ranks, share, accumulation = world
    grid = grid_of(samples, world, drop_last)
    leg = Leg.after(place, grid)
    sampler = PlacedSampler(SequentialSampler(range(samples)))
    sampler.continue_at(place, leg.done * grid.batch)
    batches = BatchSampler(sampler, share, drop_last)
    assert len(list(sampler)) == leg.done * grid.batch + samples - place.samples
    shards = []
    for rank in range(ranks):
        sampler.continue_at(place, leg.done * grid.batch)
        dealt = BatchSamplerShard(batches, ranks, rank) if ranks > 1 else batches
        shards.append(list(SkipBatchSampler(dealt, leg.done)))
    assert {len(shard) for shard in shards} == {leg.micro_batches - leg.done}
    assert leg.updates == math.ceil(leg.micro_batches / accumulation)
    made = min(leg.micro_batches, leg.done + steps * accumulation)
    seen = [
        sample for micro in range(made - leg.done) for shard in shards for sample in shard[micro]
    ]
    over = made >= leg.micro_batches
    after = TrainerPlace(
        place.epoch + over, 0 if over else leg.samples(made, grid), grid.per_step, ranks
    )
    return after, seen


@given(
    st.integers(1, 60),
    st.lists(st.tuples(worlds, st.integers(1, 4)), min_size=1, max_size=4),
    worlds,
    st.booleans(),
)
def test_whatever_the_worlds_in_turn_an_epoch_is_its_samples_in_order(
    samples: int,
    starts: list[tuple[tuple[int, int, int], int]],
    last: tuple[int, int, int],
    drop_last: bool,
) -> None:
    place, seen = TrainerPlace(), list[int]()
    for world, steps in [*starts, (last, samples)]:
        if place.epoch == 0:
            place, more = play(place, world, samples, drop_last, steps)
            seen += more
    once = seen[:samples]
    assert once == list(range(len(once)))
    if drop_last:
        assert len(seen) <= samples
    else:
        assert len(once) == samples
        assert set(seen[samples:]) <= set(range(samples))  # fills up the last batches


@given(st.integers(1, 60), worlds, worlds, st.integers(0, 40), st.integers(1, 4))
def test_the_steps_to_go_are_those_that_the_epochs_have(
    samples: int,
    before: tuple[int, int, int],
    now: tuple[int, int, int],
    steps: int,
    epochs: int,
) -> None:
    old, new = grid_of(samples, before, False), grid_of(samples, now, False)
    epoch, done = divmod(min(steps, epochs * old.updates), old.updates)
    place = TrainerPlace(epoch, done * old.per_step, old.per_step, before[0])
    left, at = 0, place
    while at.epoch < epochs:
        taken = Leg.after(at, new)
        left += taken.updates - taken.done // new.accumulation
        at = TrainerPlace(at.epoch + 1, 0, new.per_step, now[0])
    assert steps_to_go(place, new, float(epochs)) == left
    half = steps_to_go(place, new, epochs - 0.5)
    assert 0 <= half <= left


@given(st.integers(1, 60), worlds, st.integers(1, 4), st.integers(0, 40))
def test_the_place_of_an_older_run_is_that_of_its_steps(
    samples: int, world: tuple[int, int, int], ranks: int, steps: int
) -> None:
    now, (_, share, accumulation) = grid_of(samples, world, False), world
    before = grid_of(samples, (ranks, share, accumulation), False)
    epoch, done = divmod(steps, before.updates)
    expected = TrainerPlace(epoch, done * before.per_step, before.per_step, ranks)
    assert TrainerPlace.of_step(steps, ranks, now, world[0]) == expected
