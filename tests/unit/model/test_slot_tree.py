"""The sum over slots is the same to the bit, however they are divided among ranks."""

from __future__ import annotations

from functools import partial
from operator import add

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from kempner.data.order.batch_slices import PADDING, Slicing, rank_slice
from kempner.model.spec.slot_tree import SubtreeSums, most_kept, slots_of, subtrees

FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-1e6, max_value=1e6)


def by_definition(values: list[np.float32], first: int, size: int) -> np.float32 | None:
    """A node of the tree, as the module describes it; None behind the last slot."""
    if first >= len(values):
        return None
    if size == 1:
        return values[first]
    left = by_definition(values, first, size // 2)
    right = by_definition(values, first + size // 2, size // 2)
    assert left is not None  # its first slot is there
    return left if right is None else left + right


def over_ranks(values: list[np.float32], cuts: list[int]) -> np.float32:
    """Ranks that own what lies between the cuts, each of which sends its subtrees once."""
    received = SubtreeSums[np.float32](add)
    for start, stop in zip([0, *cuts], [*cuts, len(values)], strict=True):
        own = SubtreeSums[np.float32](add)
        for slot in range(start, stop):
            own.push(range(slot, slot + 1), values[slot])
        assert [subtree for subtree, _ in own.kept] == subtrees(range(start, stop))
        for subtree, value in own.kept:
            received.push(subtree, value)
    return received.whole()


@given(st.lists(FLOATS, min_size=1, max_size=40), st.data())
def test_any_division_of_the_slots_gives_the_same_bits(
    numbers: list[float], data: st.DataObject
) -> None:
    values = [np.float32(number) for number in numbers]
    size = 1 << (len(values) - 1).bit_length()
    expected = by_definition(values, 0, size)
    cuts = data.draw(st.lists(st.integers(0, len(values)), max_size=9).map(sorted))
    assert over_ranks(values, cuts) == expected
    assert over_ranks(values, []) == expected


@given(st.integers(1, 200), st.integers(1, 40))
def test_ranks_own_the_slots_in_order_and_send_few_sums(total: int, world: int) -> None:
    owned = [slots_of(total, rank, world) for rank in range(world)]
    assert [slot for slots in owned for slot in slots] == list(range(total))
    assert owned == [rank_slice(0, total, rank, world) for rank in range(world)]
    longest = max(map(len, owned))
    for slots in owned:
        assert len(subtrees(slots)) <= max(1, 2 * (longest.bit_length() - 1) + 1)
    heights = []
    for slots in owned:
        sums = SubtreeSums[int](add)
        for slot in slots:
            heights.append(len(sums.kept) + 1)
            sums.push(range(slot, slot + 1), 1)
    assert most_kept(total, world) == max(heights)


@given(st.integers(0, 6), st.integers(0, 6))
def test_on_powers_of_two_a_rank_sends_one_sum(slots: int, ranks: int) -> None:
    owns = partial(slots_of, 1 << slots, world=1 << min(slots, ranks))
    assert all(len(subtrees(owns(rank=rank))) == 1 for rank in range(1 << min(slots, ranks)))


def test_a_sum_in_the_order_of_the_ranks_is_another() -> None:
    """What the tree is for: without it the bits depend on the number of ranks."""
    values = [np.float32(number) for number in (1e8, 1.0, 1.0, 1.0, -1e8, 3.0)]
    alone = sum(values[1:], values[0])
    of_two = sum(values[1:3], values[0]) + sum(values[4:], values[3])
    assert alone != of_two
    assert over_ranks(values, []) == over_ranks(values, [3])


@given(st.integers(1, 60), st.integers(1, 5), st.integers(1, 6), st.integers(1, 6))
def test_ranks_that_take_slots_in_turn_have_the_newest_ones_of_their_range(
    batch: int, size: int, replicas: int, turns: int
) -> None:
    """Slot number m * turns + r of a range is micro batch m of the rank whose turn is r."""
    world, slots = replicas * turns, -(-batch // size)
    seen = []
    for rank in range(world):
        own = slots_of(slots, rank // turns, replicas)
        slicing = Slicing(batch, size, rank, world, whole_slots=True, turns=turns)
        for number, rows in enumerate(slicing.rows(0)):
            slot = own.start + number * turns + rank % turns
            there = [row for row in rows if row != PADDING]
            expected = range(batch)[slot * size :][:size] if slot in own else []
            assert there == list(expected)
            seen += there
    assert sorted(seen) == list(range(batch))
