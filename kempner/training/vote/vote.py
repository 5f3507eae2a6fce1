"""The vote: once per step all ranks agree on stop, void and rollback.

The ballot is an asynchronous all-reduce (MAX) of a handful of integers on a Gloo group of its own.
It is under way while the step computes, so that reading it afterwards costs next to nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
import torch.distributed as dist

from kempner.run.process.stop_reason import StopReason

_NO_HURRY = _NEVER = -(1 << 62)


@dataclass(frozen=True)
class LoopSteps:
    """How a loop of the user's own goes on a rank.

    `idle` is in how many steps, up to the last, no optimizer has stepped; `left_after` the step
    after which the rank has left the loop of its own accord: it makes no other.
    """

    idle: int = 0
    left_after: int | None = None

    def encode(self, rank: int) -> list[int]:
        """As integers of which the greatest counts."""
        number = rank + 1
        if self.left_after is None:
            return [-self.idle, 0, number, -1, _NEVER]
        return [-self.idle, number, 0, self.left_after, -self.left_after]


@dataclass(frozen=True)
class LoopExit:
    """Ranks have left the loop, the first of them after step `first` and the last after `last`.

    `left` is one of them, `stayed` one that has not, if there is any.
    """

    left: int
    stayed: int | None
    first: int
    last: int

    @classmethod
    def decode(cls, left: int, stayed: int, last: int, first: int) -> Self | None:
        """From the greatest integers of all ranks; None if no rank has left."""
        return cls(left - 1, stayed - 1 if stayed else None, -first, last) if left else None

    @property
    def together(self) -> bool:
        """Whether all ranks have left, after the same step."""
        return self.stayed is None and self.first == self.last

    def __str__(self) -> str:
        if self.stayed is None:
            said = f"some ranks have left the loop after step {self.first}, and others after step "
            said += f"{self.last}"
        else:
            said = f"rank {self.left} has left the loop after step {self.last}, and rank "
            said += f"{self.stayed} has not"
        return f"{said}: leave it on all ranks after the same step, by what all of them know"


@dataclass(frozen=True)
class Vote:
    """The vote of one rank.

    `stop` is the reason to stop after this step, NONE to continue; `void` that this rank has no
    data for the step and that the step must therefore not count, `diverged` that the loss has
    diverged and that the run must go back, `failed_saves` how many saves failed in a row,
    `unsaved_for` for how many seconds none has worked (infinite where no time heals it),
    `save_again` that it is time for another try, `seconds_left` what is left, when the vote opens,
    until the process is killed; None is for ever. `superseded` is that a newer attempt owns the
    run.
    """

    stop: StopReason = StopReason.NONE
    void: bool = False
    diverged: bool = False
    failed_saves: int = 0
    unsaved_for: float = 0.0
    save_again: bool = False
    seconds_left: float | None = None
    superseded: bool = False

    @property
    def steps(self) -> LoopSteps:
        """How the steps go on this rank; kempner's own loop neither idles nor leaves."""
        return LoopSteps()

    def encode(self, rank: int) -> list[int]:
        """Of `rank`, as integers of which the greatest wins: fewer milliseconds left give more."""
        hurry = _NO_HURRY if self.seconds_left is None else -round(1000 * self.seconds_left)
        unsaved = -_NO_HURRY if math.isinf(self.unsaved_for) else round(1000 * self.unsaved_for)
        flags = (self.stop, self.void, not self.void, self.diverged, self.superseded)
        counts = (self.failed_saves, unsaved, hurry)
        return [*map(int, (*flags, self.save_again)), *counts, *self.steps.encode(rank)]


@dataclass(frozen=True)
class StepVote(Vote):
    """The vote of a rank in a loop of the user's own."""

    own: LoopSteps = LoopSteps()

    @property
    def steps(self) -> LoopSteps:
        """How the steps go on this rank."""
        return self.own


@dataclass(frozen=True)
class VoteResult(Vote):
    """What all ranks do: for each entry the most urgent value that any rank voted for.

    `all_void` is whether no rank at all has data for the step. `idle` is the least of any rank,
    `parting` the ranks that have left the loop, if any has.
    """

    all_void: bool = False
    idle: int = 0
    parting: LoopExit | None = None

    @classmethod
    def decode(cls, votes: list[int]) -> Self:
        """From the greatest integers that any rank's `encode` gave."""
        stop, void, loaded, diverged, superseded, save_again, *votes = votes
        failed_saves, unsaved, hurry, active, *leaving = votes
        return cls(
            stop=StopReason(stop),
            void=bool(void),
            diverged=bool(diverged),
            failed_saves=failed_saves,
            unsaved_for=math.inf if unsaved == -_NO_HURRY else unsaved / 1000,
            save_again=bool(save_again),
            seconds_left=None if hurry == _NO_HURRY else -hurry / 1000,
            superseded=bool(superseded),
            all_void=not loaded,
            idle=-active,
            parting=LoopExit.decode(*leaving),
        )


class Ballot:
    """The vote of one step while it is under way."""

    def __init__(self, votes: torch.Tensor, work: dist.Work | None) -> None:
        self._votes, self._work = votes, work

    def close(self) -> VoteResult:
        """Wait for the last vote and return what all ranks do, the same on every rank.

        May be called again.
        """
        if self._work is not None:
            self._work.wait()
        return VoteResult.decode(self._votes.tolist())


class VoteGroup:
    """The ranks, as voters on their own group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)

    def open(self, vote: Vote) -> Ballot:
        """Cast this rank's vote; every rank opens the same ballots in the same order."""
        votes = torch.tensor(vote.encode(self._rank), dtype=torch.int64)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Ballot(votes, work)
