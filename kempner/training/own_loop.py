"""A loop that kempner does not write itself, step by step: vote, save, leave.

`survive` and the integrations drive it:

    loop.begin()
    while more to do:
        loop.begin_step(); ...; agreed = loop.end_step(step)
        if loop.save_is_due(agreed, ...): loop.save(agreed)
        if agreed.stop: break
    code = loop.leave(agreed)
"""

from __future__ import annotations

from dataclasses import replace

from kempner.checkpoint.format.manifest import TrainState
from kempner.config.sections import CheckpointSection
from kempner.run.control.protocol import Phase
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.retry import storage_waits
from kempner.run.record.events import LedgerEvent
from kempner.training.final_save import time_to_spare
from kempner.training.rehearsal.switch import recorder
from kempner.training.session import Session
from kempner.training.vote import (
    Ballot,
    Saver,
    Vote,
    VoteGroup,
    VoteResult,
    finish,
    refuse_to_go_on_unsaved,
)

IDLE_AT_MOST = 8
"""Allowed steps in a row without an optimizer step. `GradScaler` skips some at the start."""

_SAVE_PATIENCE = 60.0
"""Most seconds to wait for a save in flight after an exception in the loop."""


class OwnLoop:
    """The state of such a loop. Call every method on every rank, in the same order."""

    suspicious = False
    """Always False: only the loop itself knows its losses."""

    def __init__(
        self, session: Session, checkpoints: Saver, train_state: TrainState | None
    ) -> None:
        self.session, self.checkpoints = session, checkpoints
        self.ranks, self.shutdown = session.ranks, session.shutdown
        self.vote_group = VoteGroup(session.ranks.votes)
        self.train_state = train_state or TrainState()
        """The train state after the last step."""
        self.idle = 0
        """Number of last steps in which no optimizer has stepped on this rank."""
        self.left_after: int | None = None
        """The step after which this rank has left the loop by itself."""
        self._ballot: Ballot | None = None
        self._recorder = recorder()

    def begin(self) -> None:
        self.session.tell_ready(self.train_state.step)

    @property
    def voting(self) -> bool:
        """Whether a step is under way."""
        return self._ballot is not None

    def begin_step(self) -> None:
        """Open the vote, which runs while the step computes."""
        if self._recorder is not None:
            self._recorder.begin_step(self.train_state.step + 1, self.shutdown.should_shutdown)
        self._ballot = self.vote_group.open(self.vote())

    def end_step(self, step: int) -> VoteResult:
        """Note that `step` steps are done; returns the result of the vote, the same on each
        rank."""
        ballot = self._ballot or self.vote_group.open(self.vote())
        with self.session.progress.waiting("the vote"):
            agreed = ballot.close()
        self._ballot = None
        self.train_state = replace(self.train_state, step=step, cursor=step)
        self.session.progress.made(step)
        if self._recorder is not None:
            self._recorder.end_step(step)
        self._refuse_to_go_on_unsaved(agreed)
        if agreed.parting is not None:
            raise UsageError(str(agreed.parting))
        if agreed.idle >= IDLE_AT_MOST:
            raise UsageError(describe_idleness(agreed.idle))
        return agreed

    def part(self, step: int) -> VoteResult:
        """Note that this rank has left the loop after `step` steps, and vote. Raises `UsageError`
        unless all ranks have left after the same step."""
        if self._ballot is not None:  # the vote of the step in which it has left
            self._ballot.close()
            self._ballot = None
        self.train_state = replace(self.train_state, step=step, cursor=step)
        self.left_after = step
        self.session.progress.made(step)
        agreed = self.ask()
        if agreed.parting is not None and not agreed.parting.together:
            raise UsageError(str(agreed.parting))
        return agreed

    def ask(self) -> VoteResult:
        """A vote between two steps."""
        with self.session.progress.waiting("the vote"):
            return self.vote_group.open(self.vote()).close()

    def agree(self) -> VoteResult:
        """A vote between two steps; raises as `end_step` if saves keep failing."""
        agreed = self.ask()
        self._refuse_to_go_on_unsaved(agreed)
        return agreed

    def save_is_due(self, agreed: VoteResult, on_interval: bool) -> bool:
        """Whether to save now: on the loop's interval, or again after a failed save."""
        due = agreed.save_again if agreed.failed_saves else on_interval
        return due and not agreed.stop

    def save(self, agreed: VoteResult | None) -> None:
        """Save the state of this step; `agreed` is the last vote, for a loop that votes in every
        step."""
        self.session.note_trackers()
        if self._recorder is not None:
            self._recorder.saved(self.train_state.step)
        with self.session.progress.during(Phase.SAVE):
            counted = None if agreed is None else agreed.failed_saves
            self.checkpoints.save(self.train_state, counted)

    def wait_for_save(self) -> None:
        """Wait for the save in flight, at most a minute, after an exception or at the end of the
        program."""
        left = time_to_spare(self.shutdown.seconds_left())
        patience = min(_SAVE_PATIENCE, _SAVE_PATIENCE if left is None else left)
        with self.session.progress.during(Phase.SAVE):
            try:
                self.checkpoints.settle(patience)
            except RuntimeError as error:  # from the peers' loss that the loop's exception is about
                logger().warning("the save in flight has failed", reason=str(error))

    def leave(self, agreed: VoteResult, steps: int | None = None) -> ExitCode:
        """Commit what can be committed, and leave the other ranks; returns how the loop ended.
        `steps` is their total number, if the program has left before the last one."""
        self.session.progress.phase = Phase.SAVE
        if self._recorder is not None:
            self._recorder.left()
        code, words = finish(self, agreed, steps)
        self.session.end(code, words, code is ExitCode.COMPLETED and steps is None)
        return code

    def vote(self) -> Vote:
        vote = Vote.to_go_on(self.shutdown.request, *self.checkpoints.poll())
        return replace(vote, idle=self.idle, left_after=self.left_after)

    def _refuse_to_go_on_unsaved(self, agreed: VoteResult) -> None:
        limits = CheckpointSection().max_failures, storage_waits().patience
        refuse_to_go_on_unsaved(self.checkpoints, agreed, *limits)

    def record(self, event: LedgerEvent) -> None:
        self.session.record(event)


def describe_idleness(steps: int) -> str:
    """The sentence for steps without an optimizer step."""
    period = "the first step" if steps == 1 else f"{steps} steps in a row"
    return (
        f"no optimizer has stepped in {period}: a step of survive(...) is one of the optimizer; "
        "train in the loop, and for several batches a step give survive(accumulate=...)"
    )
