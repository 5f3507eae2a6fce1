"""Slices cover every step exactly, and all ranks run the same number of micro steps."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kempner.data.order.batch_slices import PADDING, Slicing, micro_steps, rank_slice

SIZES = st.integers(1, 70)


@given(cursor=st.integers(0, 2**50), batch=SIZES, world=SIZES)
def test_slices_are_contiguous_even_and_exact(cursor: int, batch: int, world: int) -> None:
    slices = [rank_slice(cursor, batch, rank, world) for rank in range(world)]
    assert [i for part in slices for i in part] == list(range(cursor, cursor + batch))
    lengths = {len(part) for part in slices}
    assert max(lengths) - min(lengths) <= 1


@given(cursor=st.integers(0, 2**50), batch=SIZES, world=SIZES, micro=SIZES)
def test_rows_hold_the_slice_and_are_equal_in_shape(
    cursor: int, batch: int, world: int, micro: int
) -> None:
    consumed: list[int] = []
    for rank in range(world):
        slicing = Slicing(batch, micro, rank, world)
        rows = slicing.rows(cursor)
        assert len(rows) == slicing.micro_steps == micro_steps(batch, world, micro)
        assert {len(row) for row in rows} == {micro}
        flat = [position for row in rows for position in row]
        mine = slicing.positions(cursor)
        assert flat == mine + [PADDING] * (len(flat) - len(mine))
        consumed += mine
    assert sorted(consumed) == list(range(cursor, cursor + batch))


@pytest.mark.parametrize(
    ("batch", "world", "lengths"),
    [
        (8, 3, [2, 3, 3]),
        (8, 2, [4, 4]),
        (3, 5, [0, 1, 0, 1, 1]),
        (32, 28, [1] * 24 + [2] * 4),
    ],
)
def test_uneven_worlds(batch: int, world: int, lengths: list[int]) -> None:
    found = [len(rank_slice(0, batch, rank, world)) for rank in range(world)]
    assert sorted(found) == sorted(lengths)


def test_28_ranks_share_32_sequences_in_two_micro_steps() -> None:
    assert micro_steps(32, world=28, micro_batch_size=1) == 2
    assert micro_steps(32, world=28, micro_batch_size=2) == 1


def test_a_rank_without_a_share_gets_padding_only() -> None:
    idle = Slicing(global_batch_size=3, micro_batch_size=2, rank=0, world=5)
    assert idle.positions(30) == []
    assert idle.rows(30) == [[PADDING, PADDING]]


def test_batches_go_on_from_any_step() -> None:
    slicing = Slicing(global_batch_size=8, micro_batch_size=2, rank=1, world=3)
    from_start = list(islice(slicing.slices_from(0), 3 * slicing.micro_steps))
    later = list(islice(slicing.slices_from(slicing.next(0)), 2 * slicing.micro_steps))
    assert from_start[slicing.micro_steps :] == later
    assert [part.last for part in later] == [False, True] * 2
    assert [part.cursor_after for part in later] == [16, 16, 24, 24]


@pytest.mark.parametrize(("batch", "rank", "world"), [(8, 3, 3), (8, -1, 3), (0, 0, 1), (8, 0, 0)])
def test_impossible_places_are_refused(batch: int, rank: int, world: int) -> None:
    with pytest.raises(ValueError, match=f"rank {rank} of {world}"):
        rank_slice(0, batch, rank, world)


def test_no_step_begins_in_what_is_skipped() -> None:
    slicing = Slicing(4, 4, rank=0, world=1, skips=((24, 30), (8, 16), (16, 20)))
    cursor, begun = slicing.first(0), []
    while cursor < 40:
        begun.append(cursor)
        cursor = slicing.next(cursor)
    assert begun == [0, 4, 20, 30, 34, 38]
    assert [slicing.first(cursor) for cursor in (7, 8, 15, 20, 29)] == [7, 20, 20, 20, 30]
    parts = list(islice(slicing.slices_from(8), 2))
    assert [part.positions for part in parts] == [[20, 21, 22, 23], [30, 31, 32, 33]]
    assert [part.cursor_after for part in parts] == [30, 34]
