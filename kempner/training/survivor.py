"""The steps of a loop that survives: what `survive` returns, from its first step to its end.

However the loop is left, what is done is committed: after the last step or `finish` the run is
complete; after a `break` or a `return` it goes on at the next start. After an exception the newest
checkpoint stays as it is, since the step under way is not whole.

The batches of a loop's steps: from a loader, and held by its checkpoints.
"""

from __future__ import annotations

import json
import os
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

import torch
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.groups import RegisteredState
from kempner.checkpoint.registered.objects import Held
from kempner.data.serve.draws import kept
from kempner.data.serve.places import Supply
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import ExitCode, RunError, UsageError
from kempner.run.process.retry import storage_waits
from kempner.run.process.stop_reason import StopReason
from kempner.training.leaving import Steps, StepsEnd, describe_uncommitted
from kempner.training.own_loop import OwnLoop, describe_idleness
from kempner.training.session import Session, at_prompt
from kempner.training.vote.vote import VoteResult
from kempner.training.watch.watch import Watch

NAME = "data"
"""Under which a checkpoint holds the place."""


class Batches:
    """What each step trains on: a batch, or a list of `accumulate` of them."""

    def __init__(self, supply: Supply, accumulate: int | None) -> None:
        self._supply, self._accumulate = supply, accumulate
        self._before: dict[str, Any] | None = None
        self._put_back = False
        self.epoch = 0
        """The epoch that the last batch belonged to."""

    def take(self) -> Any:
        """What the next step trains on."""
        self._before = self._supply.state_dict()
        if self._accumulate is None:
            return self._one()
        return [self._one() for _ in range(self._accumulate)]

    def _one(self) -> Any:
        batch, self.epoch = self._supply.take()
        return batch

    def put_back(self) -> None:
        """The step that was begun is not made: its batches are those of the next start."""
        self._put_back = self._before is not None

    def close(self) -> None:
        """Let go of what reads."""
        self._supply.close()

    def held_with(self, everything: RegisteredState) -> RegisteredState:
        """With the place as part of each checkpoint."""
        objects = everything.registered
        held = {NAME: Held(self._place, self._go_to)}
        if self._supply.shared:
            return replace(
                everything, registered=replace(objects, shared={**objects.shared, **held})
            )
        return replace(
            everything, registered=replace(objects, per_rank={**objects.per_rank, **held})
        )

    def _place(self) -> Mapping[str, Any]:
        if self._put_back and self._before is not None:
            return self._before
        return self._supply.state_dict()

    def _go_to(self, place: dict[str, Any]) -> None:
        self._supply.load_state_dict(place)


Step = TypeVar("Step", covariant=True)


@dataclass(frozen=True)
class LoopPlan:
    """What a loop is to do: `steps`, and a save every `save_every` of them."""

    steps: int
    save_every: int
    seed: int


class Survivor(Generic[Step]):
    """The steps of a loop, to be iterated over once, on every rank."""

    def __init__(
        self,
        plan: LoopPlan,
        session: Session,
        checkpoints: CheckpointEngine,
        batches: Batches | None,
        watch: Watch,
    ) -> None:
        self._plan, self._session, self._batches = plan, session, batches
        self.checkpoints, self._watch = checkpoints, watch
        self._loop = OwnLoop(session, checkpoints, checkpoints.restore(session.accepted))
        watch.restored()
        self._done_before = self._loop.train_state.step
        self._finished = session.ranks.broadcast(self._read_mark()) == self._done_before
        self._begun = False
        self._trained = 0
        # Of every optimizer: another one may step other parts of the model.
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    @property
    def train_state(self) -> TrainState:
        """How many steps are done."""
        return self._loop.train_state

    @property
    def epoch(self) -> int:
        """The epoch of the data, counted from 0, that the last batch belonged to."""
        return self._batches.epoch if self._batches is not None else 0

    def finish(self) -> None:
        """The step under way is the last one: with it the run is complete.

        On all ranks in the same step, by what all of them know. Leave the loop by `break`, or go
        on: there is no other step.
        """
        self._finished = True

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """The block is no step, on one rank or on all: it may take its time, and what it draws
        changes nothing that is drawn later.
        """
        devices = [self._session.ranks.device] if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
        with (
            torch.random.fork_rng(devices=devices),
            kept(),
            self._session.evaluation(),
        ):
            yield

    def __iter__(self) -> Iterator[Step]:
        if self._begun:
            raise UsageError("survive(...) was iterated over before; call it again to go on")
        self._begun = True
        return cast("Iterator[Step]", Steps(self.run))

    def run(self, leaving: StepsEnd) -> Generator[object, None, None]:
        """Make the steps, and part from the run however they end."""
        if at_prompt():
            self._session.trap_signals()
        code: ExitCode | None = None
        try:
            code = yield from self._steps()
        except GeneratorExit:
            if leaving.by_hand:
                code = self._leave()
                return
            self._loop.wait_for_save()
            words = describe_uncommitted(self._loop.train_state.step, self._plan.steps)
            self._session.leave_uncommitted(words)
            raise
        finally:
            self.checkpoints.release_staging()  # nothing waits for that once the hook is gone
            self._hook.remove()
            if self._batches is not None:
                self._batches.close()
            self._session.give_back(code)
        if code is not ExitCode.COMPLETED:
            if at_prompt() and self._session.shutdown.reason() is StopReason.INTERRUPT:
                raise KeyboardInterrupt
            raise SystemExit(int(code))

    def _steps(self) -> Generator[object, None, ExitCode]:
        """The steps that are left; then how the loop ended."""
        loop, steps = self._loop, self._plan.steps
        loop.begin()
        if self._watch.begin(self._plan.seed, self._session.ranks.world.rank == 0):
            self._session.say("NumPy and random draw other numbers: the number of ranks differs")
        agreed, unchecked = VoteResult(), True
        while loop.train_state.step < steps and not (agreed.stop or self._finished):
            step = loop.train_state.step + 1
            loop.begin_step()
            given = self._begin(step)
            yield given
            self._end()
            agreed = loop.end_step(step)
            on_interval = step % self._plan.save_every == 0
            last = step == steps or self._finished
            due = not last and loop.save_is_due(agreed, on_interval)
            look = self._watch.end_step(on_interval)
            if unchecked:  # the optimizer has its state now
                self.checkpoints.check_state()
                unchecked = False
            elif look:
                self.checkpoints.check_registered()
            if due:
                loop.save(agreed)
        if self._finished and loop.train_state.step < steps and not agreed.stop:
            agreed = loop.part(loop.train_state.step)
        return self._complete(agreed)

    def _begin(self, step: int) -> object:
        """What the loop's body gets for a step."""
        given: object = step
        if self._batches is not None:
            with self._session.progress.held_up_by_data():
                given = step, self._batches.take()
        self._session.seed_step(self._plan.seed, step)
        self._watch.begin_step()
        self._trained = 0
        return given

    def _end(self) -> None:
        self._loop.idle = 0 if self._trained else self._loop.idle + 1

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self._trained += 1
        self._watch.stepped(optimizer)
        self.checkpoints.release_staging()

    def _complete(self, agreed: VoteResult) -> ExitCode:
        """After the last step, or a stop."""
        loop = self._loop
        # What follows the loop draws the same, whether or not this process has made any step.
        self._session.seed_step(self._plan.seed, loop.train_state.step + 1)
        made = loop.train_state.step - self._done_before
        # Before there is a checkpoint that says so: all ranks know then that nothing was done.
        if not agreed.stop and made and not self._done_before and loop.ask().idle >= made:
            raise UsageError(describe_idleness(made))
        if self._finished:  # also where it was asked to stop in its last step
            self._write_mark(loop.train_state.step)
        return loop.leave(agreed)

    def _leave(self) -> ExitCode:
        """The program has left the loop by `break` or `return`: commit what is done."""
        loop = self._loop
        step = loop.train_state.step
        if loop.voting and self._trained:
            step += 1
        elif self._batches is not None:
            self._batches.put_back()
        try:
            self._end()
            agreed = loop.part(step)
            if step == self._plan.steps or self._finished:
                return self._complete(agreed)
            return loop.leave(agreed, self._plan.steps)
        except RunError as error:  # Python shows none that is raised here, and goes on
            self._session.end_with(error)

    def _read_mark(self) -> int | None:
        """The step after which the loop was finished before; rank 0 knows."""
        mark = self._session.run.finished
        if self._session.ranks.world.rank != 0 or not mark.exists():
            return None
        step = json.loads(mark.read_text())["step"]
        return step if isinstance(step, int) and step else None

    def _write_mark(self, step: int) -> None:
        """Before the step is committed: the mark of one that is not means nothing."""
        if self._session.ranks.world.rank == 0 and step < self._plan.steps:
            content = json.dumps({"step": step}).encode()
            write = partial(_write, self._session.run.finished, content)
            storage_waits().retry(write, path=self._session.run.finished)


def _write(path: Path, content: bytes) -> None:
    replace_durable(path, content, unique=str(os.getpid()))
