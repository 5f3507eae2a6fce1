"""One vote per step: whatever changes the control flow, all ranks decide together.

The ballot is an asynchronous all-reduce (MAX) of a handful of integers on a Gloo group of its own.
It is under way while the step computes, so that reading it afterwards costs next to nothing.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass

import torch
import torch.distributed as dist

from kempner.training.shutdown import StopReason


@dataclass(frozen=True)
class Wish:
    """What one rank wants; also, as the greatest of each entry, what all ranks do.

    `stop` is the reason to stop after this step, `void` that this rank has no data for the step
    and that the step must therefore not count, `failed_saves` how many saves failed in a row.
    """

    stop: StopReason = StopReason.NONE
    void: bool = False
    failed_saves: int = 0


class Ballot:
    """A vote under way."""

    def __init__(self, votes: torch.Tensor, work: dist.Work | None) -> None:
        self._votes, self._work = votes, work

    def close(self) -> Wish:
        """Wait for the last vote and return the verdict, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        stop, void, failed_saves = self._votes.tolist()
        return Wish(StopReason(stop), bool(void), failed_saves)


class Council:
    """The ranks, as voters on their own group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def open(self, wish: Wish) -> Ballot:
        """Cast this rank's vote; every rank opens the same ballots in the same order."""
        votes = torch.tensor([int(entry) for entry in astuple(wish)], dtype=torch.int64)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Ballot(votes, work)
