"""The vote: once per step all ranks agree on stop, void and rollback.

The ballot is an asynchronous all-reduce (MAX) of a handful of integers on a Gloo group of its own.
It is under way while the step computes, so that reading it afterwards costs next to nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from kempner.run.process.stop_reason import StopReason

_NO_HURRY = -(1 << 62)


@dataclass(frozen=True)
class Vote:
    """The vote of one rank.

    `stop` is the reason to stop after this step, NONE to continue; `void` that this rank has no
    data for the step and that the step must therefore not count, `diverged` that the loss has
    diverged and that the run must go back, `failed_saves` how many saves failed in a row,
    `seconds_left` what is left, when the vote opens, until the process is killed; None is for ever.
    """

    stop: StopReason = StopReason.NONE
    void: bool = False
    diverged: bool = False
    failed_saves: int = 0
    seconds_left: float | None = None

    def encode(self) -> list[int]:
        """As integers; the greatest of each wins, so fewer milliseconds left give a greater one."""
        hurry = _NO_HURRY if self.seconds_left is None else -round(1000 * self.seconds_left)
        return [int(self.stop), int(self.void), int(self.diverged), self.failed_saves, hurry]


@dataclass(frozen=True)
class VoteResult(Vote):
    """What all ranks do: for each entry the most urgent value that any rank voted for."""

    @classmethod
    def decode(cls, votes: list[int]) -> Self:
        """From the greatest integers that any rank's `encode` gave."""
        stop, void, diverged, failed_saves, hurry = votes
        seconds_left = None if hurry == _NO_HURRY else -hurry / 1000
        return cls(StopReason(stop), bool(void), bool(diverged), failed_saves, seconds_left)


class Ballot:
    """A vote under way."""

    def __init__(self, votes: torch.Tensor, work: dist.Work | None) -> None:
        self._votes, self._work = votes, work

    def close(self) -> VoteResult:
        """Wait for the last vote and return what all ranks do, the same on every rank."""
        if self._work is not None:
            self._work.wait()
        return VoteResult.decode(self._votes.tolist())


class VoteGroup:
    """The ranks, as voters on their own group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group

    def open(self, vote: Vote) -> Ballot:
        """Cast this rank's vote; every rank opens the same ballots in the same order."""
        votes = torch.tensor(vote.encode(), dtype=torch.int64)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Ballot(votes, work)
