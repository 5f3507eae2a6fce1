"""The order of a step's sums where it belongs to the samples, and not to the ranks.

The global batch is divided into slots of one micro batch each. Slots are the leaves of a binary
tree whose shape follows from their number alone: a node of level l spans 2^l slots from a multiple
of 2^l on, its value is the left child's plus the right one's, and what lies behind the last slot is
skipped. Whatever the number of ranks, the same pairs are added.

Either a rank owns a contiguous range of slots, adds up the largest complete subtrees of its range,
and only those are sent; or the ranks that share parameters by rows own a range together, take its
slots in turn, send each slot's gradient at once, and add up their own rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

T = TypeVar("T")


def slots_of(total: int, rank: int, world: int) -> range:
    """The slots of one rank, or of one group of ranks; empty for some where there are more of those
    than slots."""
    return range(total * rank // world, total * (rank + 1) // world)


def subtrees(slots: range) -> list[range]:
    """The largest complete subtrees of a range of slots, from left to right."""
    found, first = [], slots.start
    while left := slots.stop - first:
        size = 1 << (left.bit_length() - 1)
        if first:
            size = min(size, first & -first)
        found.append(range(first, first + size))
        first += size
    return found


def most_kept(total: int, world: int) -> int:
    """The largest number of sums of subtrees that are kept at a time, the newest slot's included,
    by a rank, or of `world` groups of ranks that take slots in turn by one of them."""
    return _most_of(slots_of(total, keeps_most(total, world), world))


def keeps_most(total: int, world: int) -> int:
    """The first rank, or group of ranks, of which that is true."""
    return max(range(world), key=lambda rank: _most_of(slots_of(total, rank, world)))


def _most_of(slots: range) -> int:
    kept = (len(subtrees(range(slots.start, slot))) + 1 for slot in slots)
    return max(kept, default=0)


@dataclass
class SubtreeSums(Generic[T]):
    """Sums of the largest complete subtrees of a range of slots, which grows to the right.

    `add` takes an earlier value and a later one, returns their sum, and may overwrite both.
    """

    add: Callable[[T, T], T]
    kept: list[tuple[range, T]] = field(default_factory=list)

    def push(self, subtree: range, value: T) -> None:
        """Add the value of a complete subtree that follows the range so far."""
        while self.kept and _are_siblings(self.kept[-1][0], subtree):
            left, earlier = self.kept.pop()
            subtree, value = range(left.start, subtree.stop), self.add(earlier, value)
        self.kept.append((subtree, value))

    @property
    def values(self) -> list[T]:
        return [value for _, value in self.kept]

    def whole(self) -> T:
        """The root's value, once all slots from the first to the last are there."""
        *earlier, (_, total) = self.kept
        for _, value in reversed(earlier):
            total = self.add(value, total)
        return total


def _are_siblings(left: range, right: range) -> bool:
    size = len(left)
    return size == len(right) and left.stop == right.start and left.start % (2 * size) == 0
