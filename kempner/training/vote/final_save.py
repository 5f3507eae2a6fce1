"""The final save: commits the last step if there is time, and says why the run ends."""

from __future__ import annotations

import math
import time
from typing import Protocol

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.store.commit import SaveFailures
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import CheckpointWriteError, ExitCode
from kempner.run.process.retry import storage_waits
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.events import Completed, LedgerEvent, Left, Stopped
from kempner.run.record.save_times import Durations
from kempner.training.groups.process_groups import Ranks
from kempner.training.policy.final_save import (
    Action,
    SaveDecision,
    SaveInFlight,
    SaveSituation,
    SaveTimes,
    decide_final_save,
    tell_loss,
    time_to_spare,
)
from kempner.training.rank_link.shutdown import StopListener
from kempner.training.vote.vote import Vote, VoteGroup, VoteResult

LAST_TRIES = 2
"""Tries to write the last checkpoint, but where storage fails: then there are more, see `next_try`.
"""


class Saver(Protocol):
    """What saves a loop's state: `CheckpointManager`, or `FolderCheckpoints` for another library's
    files. They describe the methods."""

    committed_step: int | None
    durations: Durations

    @property
    def failures(self) -> SaveFailures:
        """The saves that failed since the last commit."""

    @property
    def superseded(self) -> bool:
        """Whether a newer attempt owns the run."""

    @property
    def in_flight(self) -> tuple[int, float] | None:
        """The step of the save under way and its age in seconds, or None."""

    def save(self, train_state: TrainState, counted: int | None = None) -> None:
        """Save the state as of `train_state`."""

    def poll(self) -> None:
        """Take note of a save that has ended."""

    def settle(self, timeout: float | None = None) -> None:
        """Wait for the save in flight."""

    def join(self) -> None:
        """Wait for it; raise `SupersededError` if a newer attempt owns the run."""

    def close(self, timeout: float | None = None) -> None:
        """Wait for what is under way."""


class StoppableLoop(Protocol):
    """What is about to leave: a loop of ours, or of the user's."""

    ranks: Ranks
    shutdown: StopListener

    @property
    def checkpoints(self) -> Saver:
        """What saves the state of the loop."""

    @property
    def vote_group(self) -> VoteGroup:
        """The group in which the ranks vote."""

    @property
    def train_state(self) -> TrainState:
        """How far it has come."""

    def record(self, event: LedgerEvent) -> None:
        """A line for the run's ledger, from rank 0."""

    @property
    def suspicious(self) -> bool:
        """Whether the last steps had losses that no state should be kept after."""

    def vote(self) -> Vote:
        """What this rank wants at this moment."""


def finish(
    run: StoppableLoop, agreed: VoteResult, steps: int | None = None
) -> tuple[ExitCode, str]:
    """Commit, and say how it ended in log and ledger; the exit code, and the same in words.

    `steps` is how many there are, where a program has left its loop before the last of them.
    Raises `CheckpointWriteError` if the state cannot be committed.
    """
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


def vote_to_go_on(shutdown: StopListener, checkpoints: Saver) -> Vote:
    """What a rank wants at this moment, as far as stops and saves decide it."""
    checkpoints.poll()
    failures, now = checkpoints.failures, time.monotonic()
    return Vote(
        stop=shutdown.reason(),
        failed_saves=failures.count,
        unsaved_for=failures.lasting(now),
        save_again=failures.due(now),
        seconds_left=shutdown.seconds_left(),
        superseded=checkpoints.superseded,
    )


def _say_how_it_ends(run: StoppableLoop, event: Completed | Left | Stopped) -> None:
    """In the log of every rank, and once in the ledger."""
    logger().info(event.name, **event.to_fields())
    run.record(event)


def refuse_to_go_on_unsaved(
    checkpoints: Saver, agreed: VoteResult, max_failures: int, patience: float
) -> None:
    """Raise `CheckpointWriteError`, on all ranks alike, when saves keep failing.

    At least `max_failures` must have failed, and none worked for `patience` seconds, unless it was
    not storage that failed. `SupersededError`, a subclass, when a newer attempt owns the run.
    """
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
    """What to raise where the last step cannot be committed."""
    why = run.checkpoints.failures.reason or "another rank knows why"
    return CheckpointWriteError(
        f"the checkpoint of step {run.train_state.step} could not be written; the last good one is "
        f"intact ({why})"
    )


def secure_last_step(run: StoppableLoop) -> tuple[SaveDecision, StopReason]:
    """Bring the state of the last step to disk, move by move.

    Returns the move that ends it, and the reason of the stop as far as the ranks know it by then:
    a signal comes first, and what Slurm says about it a moment later. Raises `SupersededError`, on
    all ranks alike, if a newer attempt owns the run.
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
    """Rank 0's choice, with the deadline that is nearest on any rank; and the vote before it."""
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
    told = run.ranks.broadcast(move)
    assert isinstance(told, SaveDecision)  # rank 0 made it
    return told, agreed


def next_try(run: StoppableLoop, agreed: VoteResult, tries_left: int) -> float | None:
    """Seconds until the next save may be started; None if none is worth it any more.

    There are `tries_left` at least. A save that storage refused may be tried again as long as there
    is time, or, if that is not known, for `resilience.patience` seconds.
    """
    refused = agreed.failed_saves > 0 and not math.isinf(agreed.unsaved_for)
    patient = agreed.seconds_left is not None or agreed.unsaved_for < storage_waits().patience
    if tries_left <= 0 and not (refused and patient):
        return None
    failures = run.checkpoints.failures
    return max(0.0, failures.last + failures.pause - time.monotonic()) if refused else 0.0
