"""The steps of a loop that survives: what `survive` returns, from its first step to its end.

However the loop is left, what is done is committed: after the last step or `finish` the run is
complete; after a `break` or a `return` it goes on at the next start. After an exception the newest
checkpoint stays as it is, since the step under way is not whole.

The batches of a loop's steps: from a loader, and held by its checkpoints.

How a program leaves the loop over its steps: by `break` or `return`, or by an exception.

Python closes a generator in the same way in either case. So the iterator looks, when it is dropped,
at what the frame is doing that drops it. `break` and `return` compile to an instruction that drops
the iterator of their loop; an exception drops it in the instruction that has raised, to which a
traceback refers. An iterator that is dropped elsewhere was kept in a variable: the loop was left
some time before, and the model may have changed since. Then nothing is to be committed.
"""

from __future__ import annotations

import concurrent.futures.thread  # noqa: F401  (registers its end before `_abandon_open`)
import dis
import gc
import json
import os
import sys
import threading
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from inspect import CO_GENERATOR
from pathlib import Path
from types import FrameType, TracebackType
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


_DROPPING = {
    *("POP_TOP", "POP_ITER", "END_FOR", "FOR_ITER"),
    *("DELETE_FAST", "DELETE_NAME", "DELETE_GLOBAL", "STORE_FAST", "STORE_NAME", "STORE_GLOBAL"),
}
"""Instructions that drop an iterator, unless they raise; of CPython 3.11 to 3.14."""


@dataclass
class StepsEnd:
    """How the steps come to be closed before their end."""

    by_hand: bool = False
    """Whether by `break` or `return`, with nothing run since then."""


class Steps:
    """The iterator over the steps of `make`, which it closes as soon as it is dropped."""

    def __init__(self, make: Callable[[StepsEnd], Generator[object, None, None]]) -> None:
        self._leaving, self._process = StepsEnd(), os.getpid()
        self._steps = make(self._leaving)
        self._users: frozenset[int] = frozenset()
        self._abandoned = False
        _OPEN.add(self)

    def __iter__(self) -> Iterator[object]:
        return self

    def __next__(self) -> object:
        self._users = _users(sys._getframe(1))
        return next(self._steps)

    def abandon(self) -> None:
        """Leave the loop without a commit, unless it was left before."""
        self._abandoned = True
        if os.getpid() == self._process:  # else: a worker that was forked in the loop
            self._steps.close()

    def __del__(self) -> None:
        if self._abandoned or os.getpid() != self._process:  # Python itself may be half gone
            return
        self._leaving.by_hand = _is_left_by_hand(sys._getframe().f_back, self._users)
        self._steps.close()


def describe_uncommitted(step: int, steps: int) -> str:
    """What becomes of a loop that is left after `step` of its `steps`, but not by hand."""
    return (
        f"the loop was left after step {step} of {steps} by an exception, or with its iterator "
        "kept in a variable; the steps since the newest checkpoint are made again at the next start"
    )


_OPEN: weakref.WeakSet[Steps] = weakref.WeakSet()


def _abandon_open() -> None:
    for steps in list(_OPEN):
        steps.abandon()


# While threads can still be started: what `atexit` calls comes too late for that, from 3.12 on.
threading._register_atexit(_abandon_open)  # type: ignore[attr-defined]


def _users(frame: FrameType | None) -> frozenset[int]:
    """The frames that a step goes through: of generators and iterators around the steps, such as a
    progress bar, and the one that has their loop."""
    users = set()
    while frame is not None:
        users.add(id(frame))
        if not _is_generator(frame) and frame.f_code.co_name != "__next__":
            break
        frame = frame.f_back
    return frozenset(users)


def _is_left_by_hand(frame: FrameType | None, users: frozenset[int]) -> bool:
    """Whether `frame` drops the iterator of a loop in one of `users` by `break` or `return`.

    Where a generator is closed that has the loop, what has dropped that generator counts.
    """
    while frame is not None:
        if _instruction(frame) in _DROPPING and id(frame) in users and not _raises(frame):
            return True
        if not _is_generator(frame):
            return False
        frame = frame.f_back
    return False


def _instruction(frame: FrameType) -> str:
    return dis.opname[frame.f_code.co_code[frame.f_lasti]]


def _raises(frame: FrameType) -> bool:
    """Whether the present instruction of `frame` has raised."""
    references = gc.get_referrers(frame)
    return any(isinstance(o, TracebackType) and o.tb_lasti == frame.f_lasti for o in references)


def _is_generator(frame: FrameType) -> bool:
    return bool(frame.f_code.co_flags & CO_GENERATOR)


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
