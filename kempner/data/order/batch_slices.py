"""Computes each rank's positions in a step from the cursor; the same on every rank.

A step over a global batch of G sequences consumes the positions [cursor, cursor + G). Ranks take
contiguous slices, which may differ by one in length, or micro batches in turn. All ranks run the
same number of micro steps; what a rank lacks is filled with PADDING, rows that weigh nothing in the
loss.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import NamedTuple

PADDING = -1  # in place of a position: a row without a sample


def rank_slice(cursor: int, global_batch_size: int, rank: int, world: int, turns: int = 1) -> range:
    """The positions of one rank; empty for some where the world exceeds the batch. `turns`
    neighbours, a divisor of `world`, take those of one slice in turn. Raises ValueError unless
    0 <= rank < world and the batch has a sequence."""
    if not 0 <= rank < world or global_batch_size < 1:
        raise ValueError(f"no slice of {global_batch_size} for rank {rank} of {world}")
    group, groups = rank // turns, world // turns
    start, stop = (cursor + global_batch_size * bound // groups for bound in (group, group + 1))
    return range(start, stop)[rank % turns :: turns]


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
    turns: int = 1
    """Of `whole_slots`: this many neighbouring ranks take those of a common range in turn."""

    @cached_property
    def micro_steps(self) -> int:
        return micro_steps(self.global_batch_size, self.world, self.micro_batch_size)

    @cached_property
    def share(self) -> Sequence[int]:
        """The positions of this rank in a step, ascending, counted from its first."""
        if not self.whole_slots:
            return rank_slice(0, self.global_batch_size, self.rank, self.world)
        size = self.micro_batch_size
        slots = rank_slice(0, -(-self.global_batch_size // size), self.rank, self.world, self.turns)
        positions = range(self.global_batch_size)
        return [*chain(*(positions[slot * size :][:size] for slot in slots))]

    def positions(self, cursor: int) -> list[int]:
        """The positions of this rank in the step at `cursor`, ascending."""
        return [cursor + position for position in self.share]

    def rows(self, cursor: int) -> list[list[int]]:
        """The micro batches of that step: lists of `micro_batch_size` positions or PADDING."""
        size = self.micro_batch_size
        mine = self.positions(cursor)
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
