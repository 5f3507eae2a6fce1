"""Every sample comes once an epoch, whatever the world, the batches and the stops."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from itertools import islice, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kempner.data.order.global_batches import (
    GlobalBatches,
    next_step,
    samples_at,
    share,
    spans_from,
)

POSITIONS = st.integers(0, 500)


@dataclass(frozen=True)
class Attempt:
    """`world` ranks take `batches` batches, and stop."""

    world: int
    size: int
    batches: int


@st.composite
def attempts(draw: st.DrawFn) -> list[Attempt]:
    world = st.integers(1, 5)
    drawn = draw(st.lists(st.tuples(world, st.integers(0, 9), st.integers(0, 30)), max_size=4))
    return [Attempt(world, world + more, batches) for world, more, batches in drawn]


@st.composite
def cuts(draw: st.DrawFn) -> GlobalBatches:
    world = draw(st.integers(1, 5))
    size = world + draw(st.integers(0, 9))
    drop_last, infinite = draw(st.booleans()), draw(st.booleans())
    samples = draw(st.integers(size if drop_last else 1, 60))
    return GlobalBatches(samples, size, world, drop_last, infinite)


def run(samples: int, plan: list[Attempt], *, drop_last: bool, infinite: bool) -> list[int]:
    """The positions in the order in which they are consumed."""
    position, seen = 0, []
    for attempt in plan:
        cut = GlobalBatches(samples, attempt.size, attempt.world, drop_last, infinite)
        for span in islice(spans_from(cut, position), attempt.batches):
            shares = [share(span, rank, attempt.world) for rank in range(attempt.world)]
            assert min(map(len, shares)) > 0, "a rank without a sample waits for the others"
            assert max(map(len, shares)) <= -(-attempt.size // attempt.world)
            if attempt.size % attempt.world == 0:
                assert len(set(map(len, shares))) == 1
            seen += sorted(position for one in shares for position in one)
        position = cut.after(position, attempt.batches)
    return seen


@given(samples=st.integers(1, 40), plan=attempts(), infinite=st.booleans())
def test_nothing_is_repeated_or_missed(
    samples: int, plan: list[Attempt], *, infinite: bool
) -> None:
    seen = run(samples, plan, drop_last=False, infinite=infinite)
    assert seen == list(range(len(seen)))
    whole = len(seen) // samples
    for epoch in range(whole):
        found = samples_at(seen[epoch * samples :][:samples], samples, 7)
        assert sorted(found) == list(range(samples))


@given(samples=st.integers(14, 60), plan=attempts(), infinite=st.booleans())
def test_drop_last_leaves_out_less_than_a_batch_at_the_end_of_an_epoch(
    samples: int, plan: list[Attempt], *, infinite: bool
) -> None:
    seen = run(samples, plan, drop_last=True, infinite=infinite)
    assert max(Counter(seen).values(), default=1) == 1
    assert seen == sorted(seen)
    largest = max((attempt.size for attempt in plan), default=0)
    for before, after in pairwise(seen):
        if after != before + 1:
            assert after % samples == 0
            assert after - before - 1 < largest


@given(cut=cuts(), position=POSITIONS, batches=st.integers(0, 80))
def test_a_position_is_found_without_walking_there(
    cut: GlobalBatches, position: int, batches: int
) -> None:
    spans = list(islice(spans_from(cut, position), batches + 1))
    after = cut.after(position, batches)
    assert cut.span(after) == spans[batches]
    assert after in (spans[batches].start, (spans[batches - 1] if batches else spans[0]).stop) or (
        not batches and after == position
    )


@given(cut=cuts(), position=POSITIONS, further=st.integers(0, 4))
def test_epochs_follow_each_other(cut: GlobalBatches, position: int, further: int) -> None:
    epoch = position // cut.samples + further
    start = cut.epoch_start(epoch, position)
    walked = position
    while walked < epoch * cut.samples:
        walked = cut.after(walked, 1) if not cut.drop_last else epoch * cut.samples
    assert start == walked


@given(cut=cuts(), epoch=st.integers(0, 5))
def test_an_epoch_has_the_batches_that_begin_in_it(cut: GlobalBatches, epoch: int) -> None:
    start = cut.epoch_start(epoch, 0)
    begun = 0
    for span in spans_from(cut, start):
        if span.start >= (epoch + 1) * cut.samples:
            break
        begun += 1
    if start < (epoch + 1) * cut.samples:
        assert cut.batches_left(start) == begun
        assert cut.batches_left(0) >= begun


@given(
    samples=st.integers(1, 60),
    world=st.integers(1, 4),
    batch_size=st.integers(1, 4),
    accumulation=st.integers(1, 4),
    position=st.integers(0, 100),
    infinite=st.booleans(),
)
def test_the_next_step_is_what_the_ranks_take_together(
    samples: int, world: int, batch_size: int, accumulation: int, position: int, *, infinite: bool
) -> None:
    place = {"samples": samples, "world": world, "batch_size": batch_size, "seed": 3}
    steps = [
        next_step(position, rank=rank, accumulation=accumulation, infinite=infinite, **place)
        for rank in range(world)
    ]
    (after,) = {step.position for step in steps}
    assert len({len(step.indices) for step in steps}) == 1
    taken = [index for step in steps for micro in step.indices for index in micro]
    assert sorted(taken) == sorted(samples_at(range(position, after), samples, 3))
    if infinite:
        assert after == position + world * batch_size * accumulation
        assert [len(micro) for micro in steps[0].indices] == [batch_size] * accumulation
    else:  # a step ends with the epoch, but for what fills up the last batch
        assert after < (position // samples + 1) * samples + world


def test_ends_of_epochs_as_the_page_shows_them() -> None:
    place = {"samples": 10, "world": 2, "batch_size": 2, "seed": None}
    last = next_step(8, rank=1, **place)
    assert last == ([[9]], 10)
    assert next_step(8, rank=1, infinite=True, **place) == ([[9, 1]], 12)
    assert next_step(4, rank=0, drop_last=True, **place) == ([[4, 6]], 10)
    assert next_step(9, rank=1, **place) == ([[0]], 11)


@pytest.mark.parametrize(
    ("cut", "words"),
    [
        ((0, 1), "no sample"),
        ((5, 2, 3), "too small for 3 ranks"),
        ((5, 6, 1, True), "drop_last leaves nothing of 5 samples"),
    ],
)
def test_what_cannot_be_cut_is_refused(cut: tuple[int, ...], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        GlobalBatches(*cut)


def test_a_rank_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        next_step(0, samples=5, world=2, rank=2, batch_size=1)
