"""`survive`: lets your own training loop stop, save and resume.

    for step, batch in survive(model, optimizer, data=loader, steps=1000, save_every=50):
        ...

Iterating resumes from the newest checkpoint and its position in the data, votes in every step,
saves, and stops all ranks after the same step. Under `kempner supervise -- COMMAND` the ranks also
report to the supervisor.

When the loop ends, completed steps are committed: after the last step or `finish` the run is
complete; after a `break` or a `return` the next start resumes it. After an exception nothing is
committed, since a step is incomplete, and the newest checkpoint stays.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from numbers import Integral
from pathlib import Path
from typing import Any, Generic, TypeVar, cast, overload

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kempner.checkpoint.format.manifest import TrainState, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.groups import RegisteredState, gather
from kempner.checkpoint.registered.objects import Held
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.store.selection import newest
from kempner.config.sections import CheckpointSection
from kempner.data.serve.places import Supply, supply_of
from kempner.data.serve.sample_rng import kept, key
from kempner.run.process.durable_io import replace_durable
from kempner.run.process.exit_codes import DataError, ExitCode, RunError, StopReason, UsageError
from kempner.run.process.retry import storage_waits
from kempner.training.compute.forward_backward import given_seed, program_seed
from kempner.training.leaving import Steps, StepsEnd, describe_uncommitted
from kempner.training.own_loop import OwnLoop, describe_idleness
from kempner.training.session import RunEntry, Session, at_prompt, describe_optimizer
from kempner.training.vote import VoteResult
from kempner.training.watch import HeldObjects, Watch

NAME = "data"
"""The key of the position in the data in a checkpoint."""


class Batches:
    """The data of each step: a batch, or a list of `accumulate` batches."""

    def __init__(self, supply: Supply, accumulate: int | None) -> None:
        self._supply, self._accumulate = supply, accumulate
        self._before: dict[str, Any] | None = None
        self._put_back = False
        self.epoch = 0
        """The epoch of the last batch."""

    def take(self) -> Any:
        self._before = self._supply.state_dict()
        if self._accumulate is None:
            return self._one()
        return [self._one() for _ in range(self._accumulate)]

    def _one(self) -> Any:
        batch, self.epoch = self._supply.take()
        return batch

    def put_back(self) -> None:
        """Return the batches of an unfinished step: the next start gets them again."""
        self._put_back = self._before is not None

    def close(self) -> None:
        self._supply.close()

    def held_with(self, everything: RegisteredState) -> RegisteredState:
        objects = everything.registered
        held = {NAME: Held(self._place, self._supply.load_state_dict)}
        if self._supply.shared:
            objects = replace(objects, shared={**objects.shared, **held})
        else:
            objects = replace(objects, per_rank={**objects.per_rank, **held})
        return replace(everything, registered=objects)

    def _place(self) -> Mapping[str, Any]:
        if self._put_back and self._before is not None:
            return self._before
        return self._supply.state_dict()


@dataclass(frozen=True)
class LoopPlan:
    """The plan of a loop: `steps`, with a save every `save_every` of them."""

    steps: int
    save_every: int
    seed: int


Step = TypeVar("Step", covariant=True)


class Survivor(Generic[Step]):
    """The steps of a loop, to be iterated over once, on every rank.

    After a stop the state is committed, and iterating raises `SystemExit` with 75. A `break` or
    `return` commits, too; the next start resumes the run, unless `finish` was called.

    From the call of `survive` to the end of the loop the stop signals are trapped; then they have
    their earlier effect again. Outside of the main thread Python cannot trap signals, and only the
    supervisor's orders stop the loop.

    At a prompt (a notebook, IPython, `python -i`) they are trapped only while the loop runs. After
    a Ctrl-C the state is committed, and iterating raises `KeyboardInterrupt`; a second one within
    two seconds raises it at once. `run_dir` has no default there.
    """

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
        # For every optimizer: another one may step other parts of the model.
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    @property
    def train_state(self) -> TrainState:
        """The train state after the last step."""
        return self._loop.train_state

    @property
    def epoch(self) -> int:
        """The epoch of the last batch, counted from 0."""
        return self._batches.epoch if self._batches is not None else 0

    def finish(self) -> None:
        """Make the current step the last one, which completes the run. Call it on all ranks in the
        same step. Leave the loop by `break`, or continue: no other step follows."""
        self._finished = True

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        """Evaluate in this block, on one rank or on all: it is never a hang, and random numbers
        drawn in it do not affect later ones."""
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
        """Yield the steps, and leave the run however they end."""
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
            self.checkpoints.release_staging()  # without the hook nothing waits for the copy
            self._hook.remove()
            if self._batches is not None:
                self._batches.close()
            self._session.give_back(code)
        if code is not ExitCode.COMPLETED:
            if at_prompt() and self._session.shutdown.reason() is StopReason.INTERRUPT:
                raise KeyboardInterrupt
            raise SystemExit(int(code))

    def _steps(self) -> Generator[object, None, ExitCode]:
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
            if unchecked:  # now the optimizer has its state
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
        given: object = step
        if self._batches is not None:
            with self._session.progress.held_up_by("data"):
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
        loop = self._loop
        # Code after the loop draws the same numbers, whether or not this process has made a step.
        self._session.seed_step(self._plan.seed, loop.train_state.step + 1)
        made = loop.train_state.step - self._done_before
        # Before a checkpoint says that these steps are done, though nothing was trained.
        if not agreed.stop and made and not self._done_before and loop.ask().idle >= made:
            raise UsageError(describe_idleness(made))
        if self._finished:  # also after a stop request in the last step
            self._write_mark(loop.train_state.step)
        return loop.leave(agreed)

    def _leave(self) -> ExitCode:
        """Commit after the program has left the loop by `break` or `return`."""
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
        except RunError as error:  # Python would only print an exception here, and continue
            self._session.end_with(error)

    def _read_mark(self) -> int | None:
        """The step after which the loop was finished earlier; known to rank 0."""
        mark = self._session.run.finished
        if self._session.ranks.world.rank != 0 or not mark.exists():
            return None
        step = json.loads(mark.read_text())["step"]
        return step if isinstance(step, int) and step else None

    def _write_mark(self, step: int) -> None:
        """Write the mark before the step is committed: without the commit it has no effect."""
        if self._session.ranks.world.rank == 0 and step < self._plan.steps:
            mark, content = self._session.run.finished, json.dumps({"step": step}).encode()
            write = partial(replace_durable, mark, content, unique=str(os.getpid()))
            storage_waits().retry(write, path=mark)


@overload
def survive(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int,
    save_every: int,
    data: None = None,
    accumulate: None = None,
    keep_last: int = ...,
    seed: int | None = ...,
    run_dir: str | Path | None = ...,
    state: Mapping[str, object] | None = ...,
    per_rank: Mapping[str, object] | None = ...,
    accept_changes: Collection[str] = ...,
) -> Survivor[int]: ...


@overload
def survive(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int,
    save_every: int,
    data: Any,
    accumulate: int | None = ...,
    keep_last: int = ...,
    seed: int | None = ...,
    run_dir: str | Path | None = ...,
    state: Mapping[str, object] | None = ...,
    per_rank: Mapping[str, object] | None = ...,
    accept_changes: Collection[str] = ...,
) -> Survivor[tuple[int, Any]]: ...


def survive(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int,
    save_every: int,
    data: Any = None,
    accumulate: int | None = None,
    keep_last: int = CheckpointSection().keep_last,
    seed: int | None = None,
    run_dir: str | Path | None = None,
    state: Mapping[str, object] | None = None,
    per_rank: Mapping[str, object] | None = None,
    accept_changes: Collection[str] = (),
) -> Survivor[Any]:
    """Iterate over this instead of `range(1, steps + 1)`: it yields the remaining steps, each with
    a batch of `data` if given, or with `accumulate` batches.

    Call it once on every rank, after `init_process_group`, when `model` and `optimizer` are final.
    Both, and the objects in `state` (the same on all ranks) and `per_rank`, are loaded from the
    newest checkpoint: modules and optimizers, sharded or not; anything with `state_dict` and
    `load_state_dict`; dicts, lists, tensors and arrays, filled in place; random number generators.
    A run with `per_rank` resumes only on the same number of ranks. A checkpoint is saved every
    `save_every` steps, and the last `keep_last` are kept. Each step seeds torch's generators from
    `seed` (by default rank 0's `torch.manual_seed`; stored with the run), the step and the rank.

    `data` is a `DataLoader`, torchdata's `StatefulDataLoader`, a stream with a state, or one of
    these prepared by accelerate or Fabric. After its last batch it starts over. A resumed run
    continues with the next sample, on any number of workers and, if the data has a length, of
    ranks.

    `run_dir` is by default the supervisor's, or else `runs/<script>`. `accept_changes` names what
    may differ from the last start. Raises `UsageError`, also if the ranks disagree, `DataError` or
    `CheckpointWriteError`, printed as a sentence. How it ends: see `Survivor`.
    """
    todo = LoopRequest(steps, save_every, keep_last, seed, accumulate)
    given = HeldObjects(model, optimizer, state or {}, per_rank or {}, data)
    entry = RunEntry("survive", run_dir, accept_changes)
    with entry.guard():
        return _enter(entry, todo, given)


def _enter(entry: RunEntry, todo: LoopRequest, given: HeldObjects) -> Survivor[Any]:
    todo.check(has_data=given.data is not None)
    device = device_of("survive", given.model, given.optimizer)
    _keep_name_free(given)
    everything = gather(given.model, given.optimizer, given.state, given.per_rank)
    session = entry.meet(device, *_facts(todo, given))
    noise = _agreed_seed(session, todo.seed)
    batches = _open_batches(session, given.data, todo, noise)
    if batches is not None:
        everything = batches.held_with(everything)
    watch = Watch(everything, given)
    everything = watch.held_with(everything)
    checkpoints = open_checkpoints(session, everything, given.optimizer, todo.keep_last, noise)
    plan = LoopPlan(todo.steps, todo.save_every, noise)
    return Survivor(plan, session, checkpoints, batches, watch)


@dataclass(frozen=True)
class LoopRequest:
    """The arguments of a loop."""

    steps: int
    save_every: int
    keep_last: int
    seed: int | None = None
    accumulate: int | None = None

    def check(self, has_data: bool) -> None:
        """Raise `UsageError` if an argument is wrong."""
        least = {"steps": 1, "save_every": 1, "keep_last": 2, "seed": None, "accumulate": 1}
        for name, smallest in least.items():
            given = getattr(self, name)
            if given is not None or name not in ("seed", "accumulate"):
                check_whole("survive", name, given, smallest)
        if self.accumulate is not None and not has_data:
            raise UsageError(
                f"survive(accumulate={self.accumulate}): it has no data; give it the loader as "
                "data=..., or make several batches yourself in each step"
            )


def check_whole(caller: str, name: str, given: object, smallest: int | None) -> None:
    """Raise `UsageError` if an argument of `caller` is not a whole number, or less than
    `smallest`."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise UsageError(f"{caller}({name}={given!r}): write a whole number")
    if smallest is not None and given < smallest:
        raise UsageError(f"{caller}({name}={given}): it must be at least {smallest}")


def _facts(todo: LoopRequest, given: HeldObjects) -> tuple[dict[str, object], dict[str, object]]:
    """What all ranks must agree on, and the facts with which later starts are compared."""
    optimizer = describe_optimizer(given.optimizer)
    facts: dict[str, object] = {"steps": todo.steps, "optimizer": optimizer}
    if (seed := given_seed() if todo.seed is None else int(todo.seed)) is not None:
        facts["seed"] = seed
    if given.data is not None:
        facts["data"] = _describe(given.data)
    agree_on: dict[str, object] = {
        "steps": todo.steps,
        "save_every": todo.save_every,
        "seed": todo.seed,
        "state": sorted(given.state),
        "per_rank": sorted(given.per_rank),
        "data": facts.get("data"),
        "accumulate": todo.accumulate,
    }
    return {**agree_on, **parameters_of(given.model)}, facts


def parameters_of(model: nn.Module) -> dict[str, object]:
    """The names of the model's parameters, on which all ranks must agree."""
    names = [name for name, _ in model.named_parameters()]
    return {"the model's parameters": f"{len(names)}, {key(*names):x}"}


def _describe(data: Any) -> str:
    dataset = getattr(data, "dataset", data)
    try:
        return f"{type(dataset).__name__} of {len(dataset)}"
    except TypeError:
        return type(dataset).__name__


def _keep_name_free(given: HeldObjects) -> None:
    for argument, objects in (("state", given.state), ("per_rank", given.per_rank)):
        if given.data is not None and NAME in objects:
            raise UsageError(
                f"survive({argument}=...): the place in the data comes back by itself; leave "
                f"{NAME!r} out of {argument}, or give it another name"
            )


def _agreed_seed(session: Session, given: int | None) -> int:
    """Rank 0's seed; that of the run's first start if the program gives none."""
    mine = given if session.ranks.world.rank or given is not None else _seed_of_run(session)
    seed = session.ranks.broadcast(program_seed() if mine is None else int(mine))
    assert isinstance(seed, int)  # from rank 0
    return seed


def _seed_of_run(session: Session) -> int | None:
    """The seed with which the run began; None if it has no checkpoint."""
    folder = CheckpointFolder(session.run.checkpoints)
    step = newest(folder) if folder.path.exists() else None
    try:
        return None if step is None else read(folder.step(step), worked=True).identity.seed
    except DataError:  # the restore reports it, and sets it aside
        return None


def _open_batches(session: Session, data: Any, todo: LoopRequest, seed: int) -> Batches | None:
    if data is None:
        return None
    world = session.ranks.world
    supply = supply_of(data, seed, (world.rank, world.size))
    session.ranks.agree_on(supply.facts)
    return Batches(supply, todo.accumulate)


def device_of(caller: str, model: nn.Module, optimizer: Optimizer) -> torch.device:
    """The model's device. Raises `UsageError` if these are not a model and its optimizer."""
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            home = "torch.nn.Module" if kind is nn.Module else "torch.optim.Optimizer"
            raise UsageError(f"{caller}({name}={type(given).__name__}): it must be a {home}")
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError(f"{caller}(model): it has no parameters, so there is nothing to save")
    return parameters[0].device


def open_checkpoints(
    session: Session,
    everything: RegisteredState,
    optimizer: Optimizer,
    keep_last: int,
    seed: int | None,
) -> CheckpointEngine:
    return CheckpointEngine(
        session.context(type(optimizer).__name__.lower(), seed),
        everything.model,
        everything.optimizer,
        keep=Keep(keep_last),
        durations=session.durations,
        registered=everything.registered,
    )
