"""Computes each rank's positions in a step from the cursor; the same on every rank.

A step over a global batch of G sequences consumes the positions [cursor, cursor + G). Ranks take
contiguous slices, which may differ by one in length. All ranks run the same number of micro
steps; what a rank lacks is filled with PADDING, rows that weigh nothing in the loss.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

PADDING = -1  # in place of a position: a row without a sample


def rank_slice(cursor: int, global_batch_size: int, rank: int, world: int) -> range:
    """The positions of one rank; empty for some where the world exceeds the batch. Raises
    ValueError unless 0 <= rank < world and the batch has a sequence."""
    if not 0 <= rank < world or global_batch_size < 1:
        raise ValueError(f"no slice of {global_batch_size} for rank {rank} of {world}")
    start, stop = (cursor + global_batch_size * bound // world for bound in (rank, rank + 1))
    return range(start, stop)


def micro_steps(global_batch_size: int, world: int, micro_batch_size: int) -> int:
    """Forward and backward passes per step: as many as the longest slice needs, on all ranks."""
    longest = -(-global_batch_size // world)
    return -(-longest // micro_batch_size)


class MicroSlice(NamedTuple):
    positions: list[int]  # ascending, then PADDING
    last: bool  # whether the step ends with it
    cursor_after: int  # the first position of the next step, on every rank


@dataclass(frozen=True)
class Slicing:
    global_batch_size: int
    micro_batch_size: int
    rank: int = 0
    world: int = 1
    skips: tuple[tuple[int, int], ...] = ()
    """Ranges of positions, end excluded, in which no step begins."""
    whole_slots: bool = False
    """Cut between micro batches of the whole global batch only, which are then the same in every
    world."""

    @cached_property
    def micro_steps(self) -> int:
        return micro_steps(self.global_batch_size, self.world, self.micro_batch_size)

    @cached_property
    def share(self) -> range:
        """The positions of this rank in a step, counted from its first."""
        if not self.whole_slots:
            return rank_slice(0, self.global_batch_size, self.rank, self.world)
        size = self.micro_batch_size
        slots = rank_slice(0, -(-self.global_batch_size // size), self.rank, self.world)
        return range(slots.start * size, min(slots.stop * size, self.global_batch_size))

    def positions(self, cursor: int) -> list[int]:
        """The positions of this rank in the step at `cursor`, ascending."""
        return [cursor + position for position in self.share]

    def rows(self, cursor: int) -> list[list[int]]:
        """The micro batches of that step: lists of `micro_batch_size` positions or PADDING."""
        size = self.micro_batch_size
        mine = range(cursor + self.share.start, cursor + self.share.stop)
        rows = [*mine, *[PADDING] * (self.micro_steps * size - len(mine))]
        return [rows[at : at + size] for at in range(0, len(rows), size)]

    def first(self, cursor: int) -> int:
        """The cursor itself, or the first one behind it that no skipped range holds."""
        for start, end in sorted(self.skips):
            if start <= cursor < end:
                cursor = end
        return cursor

    def next(self, cursor: int) -> int:
        return self.first(cursor + self.global_batch_size)

    def slices_from(self, cursor: int) -> Iterator[MicroSlice]:
        """What micro batch after micro batch takes, step after step, without end."""
        cursor = self.first(cursor)
        while True:
            rows, after = self.rows(cursor), self.next(cursor)
            for number, positions in enumerate(rows, 1):
                yield MicroSlice(positions, number == len(rows), after)
            cursor = after
