"""The vote: once per step all ranks agree on stop, void and rollback; and on the final save.

The ballot is an asynchronous all-reduce (MAX) of a few integers on its own Gloo group. It runs
while the step computes, so that reading it afterwards costs almost nothing.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Protocol, TypeAlias

import torch
import torch.distributed as dist

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine, FolderCheckpoints
from kempner.checkpoint.store.commit import SaveFailures
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import CheckpointWriteError, ExitCode, StopReason
from kempner.run.process.retry import storage_waits
from kempner.run.record.events import Completed, LedgerEvent, Left, Stopped
from kempner.training.final_save import (
    Action,
    SaveDecision,
    SaveInFlight,
    SaveSituation,
    SaveTimes,
    decide_final_save,
    tell_loss,
    time_to_spare,
)
from kempner.training.groups.process_groups import Ranks
from kempner.training.rank_link.shutdown import StopListener, StopRequest

_NO_HURRY = _NEVER = -(1 << 62)


@dataclass(frozen=True)
class LoopExit:
    """Ranks have left the loop, the first after step `first` and the last after `last`. `left` is
    one of them, `stayed` one that has not left, if any."""

    left: int
    stayed: int | None
    first: int
    last: int

    @property
    def together(self) -> bool:
        return self.stayed is None and self.first == self.last

    def __str__(self) -> str:
        if self.stayed is None:
            sentence = (
                f"some ranks have left the loop after step {self.first}, and others after step "
            )
            sentence += f"{self.last}"
        else:
            sentence = f"rank {self.left} has left the loop after step {self.last}, and rank "
            sentence += f"{self.stayed} has not"
        return f"{sentence}: leave it on all ranks after the same step, by what all of them know"


@dataclass(frozen=True)
class Vote:
    """The vote of one rank.

    Attributes:
        stop: Reason to stop after this step; NONE to continue.
        void: This rank has no data for the step, which must not count.
        diverged: The loss has diverged; the run must roll back.
        failed_saves: Number of failed saves in a row.
        unsaved_for: Seconds since the last successful save; infinite if waiting cannot help.
        save_again: It is time to retry a failed save.
        seconds_left: Until the process is killed, as the vote opens; None without a limit.
        superseded: A newer attempt owns the run.
        idle: In a user's own loop, number of last steps without an optimizer step.
        left_after: In a user's own loop, the step after which the rank has left it by itself.
    """

    stop: StopReason = StopReason.NONE
    void: bool = False
    diverged: bool = False
    failed_saves: int = 0
    unsaved_for: float = 0.0
    save_again: bool = False
    seconds_left: float | None = None
    superseded: bool = False
    idle: int = 0
    left_after: int | None = None

    @classmethod
    def to_go_on(
        cls,
        request: StopRequest | None,
        failures: SaveFailures,
        superseded: bool,
        *,
        void: bool = False,
        diverged: bool = False,
    ) -> Vote:
        """The vote of a rank with a stop `request`, if any, and these failures of saves."""
        if request is None and not failures.count:
            return Vote(void=void, diverged=diverged, superseded=superseded)
        now = time.monotonic()
        return Vote(
            StopReason.NONE if request is None else request.reason,
            void,
            diverged,
            failures.count,
            failures.lasting(now),
            failures.due(now),
            None if request is None else request.seconds_left(now),
            superseded,
        )

    def encode(self, rank: int) -> list[int]:
        """The vote as integers, of which the greatest over all ranks wins."""
        hurry = _NO_HURRY if self.seconds_left is None else -round(1000 * self.seconds_left)
        unsaved = -_NO_HURRY if math.isinf(self.unsaved_for) else round(1000 * self.unsaved_for)
        flags = (self.stop, self.void, not self.void, self.diverged, self.superseded)
        counts = (self.failed_saves, unsaved, hurry)
        number, left = rank + 1, self.left_after
        steps = (0, number, -1, _NEVER) if left is None else (number, 0, left, -left)
        return [*map(int, (*flags, self.save_again)), *counts, -self.idle, *steps]


@dataclass(frozen=True)
class VoteResult(Vote):
    """The result for all ranks: for each field the most urgent vote. `all_void`: no rank has data
    for the step. `idle` is the smallest of all ranks, `parting` describes ranks that have left the
    loop, if any."""

    all_void: bool = False
    parting: LoopExit | None = None


@dataclass(frozen=True)
class Ballot:
    """The vote of one step while it is under way."""

    votes: torch.Tensor
    work: dist.Work | None

    def close(self) -> VoteResult:
        """Wait for all votes; returns the result, the same on every rank. May be called again."""
        if self.work is not None:
            self.work.wait()
        stop, void, loaded, diverged, superseded, save_again, *votes = self.votes.tolist()
        failed_saves, unsaved, hurry, active, left, stayed, last, first = votes
        parting = LoopExit(left - 1, stayed - 1 if stayed else None, -first, last) if left else None
        return VoteResult(
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
            parting=parting,
        )


class VoteGroup:
    """The ranks as voters, on their own process group."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group, self._rank = group, dist.get_rank(group)

    def open(self, vote: Vote) -> Ballot:
        """Cast this rank's vote; every rank opens the same ballots in the same order."""
        votes = torch.tensor(vote.encode(self._rank), dtype=torch.int64)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        return Ballot(votes, work)


LAST_TRIES = 2
"""Attempts to write the last checkpoint; more if storage fails, see `next_try`."""


Saver: TypeAlias = CheckpointEngine | FolderCheckpoints


class StoppableLoop(Protocol):
    """A loop that is about to end: kempner's or the user's."""

    ranks: Ranks
    shutdown: StopListener

    @property
    def checkpoints(self) -> Saver: ...

    @property
    def vote_group(self) -> VoteGroup: ...

    @property
    def train_state(self) -> TrainState: ...

    def record(self, event: LedgerEvent) -> None: ...

    @property
    def suspicious(self) -> bool: ...

    def vote(self) -> Vote: ...


def finish(
    run: StoppableLoop, agreed: VoteResult, steps: int | None = None
) -> tuple[ExitCode, str]:
    """Commit, and record the end in log and ledger; returns the exit code and a sentence. `steps`
    is the total number, if a program has left its loop before the last one. Raises
    `CheckpointWriteError` if the state cannot be committed."""
    step = run.train_state.step
    last, known_by_now = commit_last_step(run)
    if last.action is Action.DONE:
        run.checkpoints.close(timeout=time_to_spare(run.shutdown.seconds_left()))
    if last.lost and run.ranks.world.rank == 0:
        logger().warning(f"stopped after step {step}: {tell_loss(last)}")
    if not (agreed.stop or last.lost):
        if steps is not None:
            _say_how_it_ends(run, Left(step, steps))
            return ExitCode.COMPLETED, (
                f"left after step {step} of {steps}: start it again to go on, or call "
                "steps.finish() before, where this is the end"
            )
        _say_how_it_ends(run, Completed(step))
        return ExitCode.COMPLETED, f"completed {step} steps"
    reason = max(agreed.stop, known_by_now)
    sentence = run.shutdown.sentence(reason)
    _say_how_it_ends(run, Stopped(step, reason.label, last.lost, sentence))
    why = f" ({reason.words})" if reason else ""
    return ExitCode.STOPPED, f"stopped after step {step}{why}; start again to continue"


def _say_how_it_ends(run: StoppableLoop, event: Completed | Left | Stopped) -> None:
    """Write the event to the log of every rank, and once to the ledger."""
    logger().info(event.name, **event.to_fields())
    run.record(event)


def refuse_to_go_on_unsaved(
    checkpoints: Saver, agreed: VoteResult, max_failures: int, patience: float
) -> None:
    """Raise `CheckpointWriteError`, on all ranks, if `max_failures` saves have failed in a row and,
    if storage is the reason, none has succeeded for `patience` seconds. Raises `SupersededError`, a
    subclass, if a newer attempt owns the run."""
    if agreed.superseded:
        checkpoints.join()
    if agreed.failed_saves >= max_failures and agreed.unsaved_for >= patience:
        reason = checkpoints.failures.reason
        raise CheckpointWriteError(
            f"{agreed.failed_saves} checkpoints in a row could not be written; the last good one "
            f"is intact ({reason or 'another rank knows why'})"
        )


def commit_last_step(run: StoppableLoop) -> tuple[SaveDecision, StopReason]:
    """As `secure_last_step`. Raises `CheckpointWriteError` if the state cannot be committed."""
    last, known_by_now = secure_last_step(run)
    if last.action is Action.FAIL:
        raise unwritten(run)
    return last, known_by_now


def unwritten(run: StoppableLoop) -> CheckpointWriteError:
    """The error to raise if the last step cannot be committed."""
    why = run.checkpoints.failures.reason or "another rank knows why"
    return CheckpointWriteError(
        f"the checkpoint of step {run.train_state.step} could not be written; the last good one is "
        f"intact ({why})"
    )


def secure_last_step(run: StoppableLoop) -> tuple[SaveDecision, StopReason]:
    """Commit the state of the last step, one decision at a time.

    Returns the final decision, and the reason of the stop as known by then: a signal comes first,
    Slurm's explanation a moment later. Raises `SupersededError`, on all ranks, if a newer attempt
    owns the run.
    """
    tries_left = LAST_TRIES
    while True:
        move, agreed = agree_on_next_decision(run, tries_left)
        match move.action:
            case Action.WAIT:
                run.checkpoints.settle(move.patience)
            case Action.PAUSE:
                time.sleep(move.patience or 0.0)
            case Action.SAVE:
                tries_left -= 1
                run.checkpoints.save(run.train_state, agreed.failed_saves)
            case _:
                return move, agreed.stop


def agree_on_next_decision(run: StoppableLoop, tries_left: int) -> tuple[SaveDecision, VoteResult]:
    """Rank 0's decision, by the nearest deadline of all ranks; and the vote before it."""
    agreed = run.vote_group.open(run.vote()).close()
    if agreed.superseded:
        run.checkpoints.join()
    in_flight, durations = run.checkpoints.in_flight, run.checkpoints.durations
    usual, long = durations.quantile(0.5), durations.quantile(0.95)
    move = decide_final_save(
        SaveSituation(
            step=run.train_state.step,
            committed=run.checkpoints.committed_step,
            in_flight=None if in_flight is None else SaveInFlight(*in_flight),
            save_times=None if usual is None or long is None else SaveTimes(usual, long),
            warned_for=run.shutdown.seconds_since_asked(),
            seconds_left=agreed.seconds_left,
            next_try=next_try(run, agreed, tries_left),
            suspicious=run.suspicious,
        )
    )
    decision = run.ranks.broadcast(move)
    assert isinstance(decision, SaveDecision)  # rank 0 made it
    return decision, agreed


def next_try(run: StoppableLoop, agreed: VoteResult, tries_left: int) -> float | None:
    """Seconds until the next save may start; None if no further one makes sense. At least
    `tries_left` are allowed. A save that failed because of storage may be retried while there is
    time or, without a deadline, for `resilience.patience` seconds."""
    refused = agreed.failed_saves > 0 and not math.isinf(agreed.unsaved_for)
    patient = agreed.seconds_left is not None or agreed.unsaved_for < storage_waits().patience
    if tries_left <= 0 and not (refused and patient):
        return None
    failures = run.checkpoints.failures
    return max(0.0, failures.last + failures.pause - time.monotonic()) if refused else 0.0
