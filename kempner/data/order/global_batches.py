"""Cuts the endless order into global batches, and each of them over the ranks.

The position is one integer: how many samples of the endless order (`shuffle.py`) the whole world is
done with, all epochs together, those included that `drop_last` left out. Epoch e is the positions
[e * n, (e + 1) * n). A global batch is a range of positions, of which rank r of W takes every W-th
from the r-th on, as torch's `DistributedSampler` deals. So with another number of ranks, or another
batch size, the order goes on where it was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from kempner.data.order.shuffle import SampleOrder


@dataclass(frozen=True)
class GlobalBatches:
    """How an order over `samples` samples is cut into batches of `size`, all ranks together.

    The end of an epoch:

    - By default the last batch is what is left of the epoch. Where that cannot be dealt evenly to
      `world` ranks, it is filled up with the first samples of the next epoch, fewer than `world`,
      which the next epoch then leaves out.
    - `drop_last`: every batch is full, and what is left of the epoch is left out.
    - `infinite`: every batch is full, and the last one of an epoch goes on into the next.
      With `drop_last`, too, it does not.

    Raises ValueError unless 1 <= world <= size and samples >= 1, and for `drop_last` if an epoch
    has not one full batch.
    """

    samples: int
    size: int
    world: int = 1
    drop_last: bool = False
    infinite: bool = False

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise ValueError("there is no sample to draw")
        if self.world < 1 or self.size < self.world:
            raise ValueError(f"a global batch of {self.size} is too small for {self.world} ranks")
        if self.drop_last and self.samples < self.size:
            raise ValueError(
                f"drop_last leaves nothing of {self.samples} samples, "
                f"which are fewer than a global batch of {self.size}"
            )

    def epoch(self, position: int) -> int:
        """The epoch that the next batch begins in."""
        return self.span(position).start // self.samples

    def span(self, position: int) -> range:
        """The positions of the next global batch; the first is behind `position` if samples are
        left out in between.
        """
        left = self._left_of_epoch(position)
        if self.drop_last:
            start = position + left if left < self.size else position
            return range(start, start + self.size)
        if self.infinite:
            return range(position, position + self.size)
        even = -(-left // self.world) * self.world
        return range(position, position + min(self.size, even))

    def after(self, position: int, batches: int) -> int:
        """The position when `batches` more are done."""
        while batches > 0:
            full = self._left_of_epoch(position) // self.size
            if self.infinite and not self.drop_last:
                full = batches
            if full:
                position += min(batches, full) * self.size
                batches -= min(batches, full)
            else:
                position, batches = self.span(position).stop, batches - 1
        left = self._left_of_epoch(position)
        return position + left if self.drop_last and left < self.size else position

    def batches_left(self, position: int) -> int:
        """How many batches are left in the epoch of `position`: that begin in it."""
        left = self._left_of_epoch(position)
        return left // self.size if self.drop_last else -(-left // self.size)

    def epoch_start(self, epoch: int, position: int) -> int:
        """Where the batches of an epoch begin, seen from `position`, in it or before it."""
        if self.drop_last:
            return max(position, epoch * self.samples)
        while position < epoch * self.samples:
            position = self.after(position, self.batches_left(position))
        return position

    def _left_of_epoch(self, position: int) -> int:
        return self.samples - position % self.samples


def share(span: range, rank: int, world: int) -> range:
    """The positions of a global batch that one rank takes; the lengths differ by at most one."""
    return range(span.start + rank, span.stop, world)


def samples_at(positions: Sequence[int], samples: int, seed: int | None) -> list[int]:
    """Which of the samples are at these positions; in their own order without a seed."""
    at = np.fromiter(positions, np.int64, len(positions))
    found: list[int] = (
        at % samples if seed is None else SampleOrder(samples, seed).samples(at)
    ).tolist()
    return found


def spans_from(batches: GlobalBatches, position: int) -> Iterator[range]:
    while True:
        span = batches.span(position)
        yield span
        position = span.stop


class NextStep(NamedTuple):
    """What a rank takes in one optimizer step."""

    indices: list[list[int]]
    """Samples of one micro batch after another; fewer micro batches where the epoch ends."""
    position: int  # after the step, the same on every rank


def next_step(
    position: int,
    *,
    samples: int,
    world: int,
    rank: int,
    batch_size: int,
    accumulation: int = 1,
    seed: int | None = 0,
    drop_last: bool = False,
    infinite: bool = False,
) -> NextStep:
    """Which samples one rank takes in its next step, and where the world is then.

    Args:
        position: what the world is done with, see above.
        samples: size of the data set.
        world: number of data parallel ranks.
        rank: which of them.
        batch_size: samples that a rank takes in a micro batch.
        accumulation: micro batches of a step. As in any loop over a loader, a step ends with the
            epoch, unless `infinite`.
        seed: of the shuffle; None for the samples in their own order.
        drop_last: see `GlobalBatches`.
        infinite: see `GlobalBatches`.

    Raises ValueError as `GlobalBatches` and unless 0 <= rank < world.
    """
    if not 0 <= rank < world:
        raise ValueError(f"there is no rank {rank} of {world}")
    batches = GlobalBatches(samples, batch_size * world, world, drop_last, infinite)
    indices: list[list[int]] = []
    epoch = batches.epoch(position)
    while len(indices) < accumulation and (infinite or batches.epoch(position) == epoch):
        mine = share(batches.span(position), rank, world)
        indices.append(samples_at(mine, samples, seed))
        position = batches.after(position, 1)
    return NextStep(indices, position)
