"""The final save: commits the last step if there is time, and says why the run ends."""

from __future__ import annotations

from typing import Protocol

from kempner.checkpoint.format.manifest import Position
from kempner.checkpoint.manager import CheckpointManager
from kempner.run.process.exit_codes import CheckpointWriteError, ExitCode
from kempner.run.process.logs import logger
from kempner.training.groups.process_groups import Ranks
from kempner.training.policy.final_save import (
    Action,
    SaveDecision,
    SaveSituation,
    decide_final_save,
    tell_loss,
    time_to_spare,
)
from kempner.training.rank_link.shutdown import ShutdownHandler
from kempner.training.vote.vote import Vote, VoteGroup, VoteResult

LAST_TRIES = 2
"""Tries to write the last checkpoint: what fails once may be a passing fault of the storage."""


class StoppableLoop(Protocol):
    """What is about to leave: a loop of ours, or of the user's."""

    ranks: Ranks
    vote_group: VoteGroup
    shutdown: ShutdownHandler
    checkpoints: CheckpointManager
    position: Position

    def record(self, event: str, **fields: object) -> None:
        """A line for the run's ledger, from rank 0."""

    @property
    def suspicious(self) -> bool:
        """Whether the last steps had losses that no state should be kept after."""

    def vote(self) -> Vote:
        """What this rank wants at this moment."""


def finish(run: StoppableLoop, agreed: VoteResult) -> tuple[ExitCode, str]:
    """Commit, and say how it ended in log and ledger; the exit code, and the same in words.

    Raises `CheckpointWriteError` if the state cannot be committed.
    """
    step, last = run.position.step, secure_last_step(run)
    if last.action is Action.FAIL:
        raise CheckpointWriteError(
            f"the checkpoint of step {step} could not be written; the last good one is intact"
        )
    if last.action is Action.DONE:
        run.checkpoints.close(timeout=time_to_spare(run.shutdown.seconds_left()))
    name, words = "completed", f"completed {step} steps"
    if agreed.stop or last.lost:
        name, words = "stopped", f"stopped after step {step}; start again to continue"
    if last.lost and run.ranks.world.rank == 0:
        logger().warning(f"stopped after step {step}: {tell_loss(last)}")
    logger().info(name, step=step, reason=agreed.stop.name, lost_steps=last.lost)
    run.record(name, step=step, reason=agreed.stop.name, lost_steps=last.lost)
    return (ExitCode.COMPLETED if name == "completed" else ExitCode.STOPPED), words


def refuse_to_go_on_unsaved(agreed: VoteResult, max_failures: int) -> None:
    """Raise `CheckpointWriteError`, on all ranks alike, when saves keep failing."""
    if agreed.failed_saves >= max_failures:
        raise CheckpointWriteError(
            f"{agreed.failed_saves} checkpoints in a row could not be written; the last good one "
            "is intact. Look for a full disk or quota in the warnings above, then start again"
        )


def secure_last_step(run: StoppableLoop) -> SaveDecision:
    """Bring the state of the last step to disk, move by move; the move that ends it."""
    tries_left = LAST_TRIES
    while True:
        move = agree_on_next_decision(run, tries_left)
        match move.action:
            case Action.WAIT:
                run.checkpoints.join(move.patience)
            case Action.SAVE:
                tries_left -= 1
                run.checkpoints.save(run.position)
            case _:
                return move


def agree_on_next_decision(run: StoppableLoop, tries_left: int) -> SaveDecision:
    """Rank 0's choice, with the deadline that is nearest on any rank."""
    agreed = run.vote_group.open(run.vote()).close()
    step, age = run.checkpoints.in_flight or (None, 0.0)
    durations = run.checkpoints.durations
    move = decide_final_save(
        SaveSituation(
            step=run.position.step,
            committed=run.checkpoints.committed_step,
            in_flight_step=step,
            in_flight_for=age,
            save_takes=durations.quantile(0.5),
            save_may_take=durations.quantile(0.95),
            warned_for=run.shutdown.seconds_since_asked(),
            seconds_left=agreed.seconds_left,
            tries_left=tries_left,
            suspicious=run.suspicious,
        )
    )
    told = run.ranks.broadcast(move)
    assert isinstance(told, SaveDecision)  # rank 0 made it
    return told
