"""`survive`: lets your own training loop stop, save and resume.

    for step in survive(model, optimizer, steps=1000, save_every=50):
        ...

Iterating resumes from the newest checkpoint, votes in every step, saves, and stops all ranks after
the same step. Under `kempner supervise -- COMMAND` the ranks also report to the supervisor.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from kempner.checkpoint.format.train_state import TrainState
from kempner.checkpoint.manager import CheckpointManager
from kempner.checkpoint.registered.everything import Everything, gather
from kempner.checkpoint.store.retention import Keep
from kempner.config.sections import CheckpointSection
from kempner.run.process.exit_codes import ExitCode, UsageError
from kempner.run.process.stop_reason import StopReason
from kempner.training.own_loop import OwnLoop
from kempner.training.session import Entry, Session, at_prompt
from kempner.training.vote.vote import VoteResult
from kempner.training.watch.strangers import Given
from kempner.training.watch.watch import Watch


def survive(
    model: nn.Module,
    optimizer: Optimizer,
    *,
    steps: int,
    save_every: int,
    keep_last: int = CheckpointSection().keep_last,
    seed: int = 0,
    run_dir: str | Path | None = None,
    state: Mapping[str, object] | None = None,
    per_rank: Mapping[str, object] | None = None,
) -> Survivor:
    """Iterate over this instead of `range(1, steps + 1)`: it yields the steps not done yet.

    Call it once on every rank, after `init_process_group`, when `model` and `optimizer` are final;
    both are loaded from the newest checkpoint, if there is one. A checkpoint is saved every
    `save_every` steps, and the last `keep_last` are kept. Each step begins with torch's generators
    seeded by `seed`, the step and the rank, so that a resumed step draws the same numbers.

    `state` is what else comes back with a checkpoint, by name: modules and optimizers, which may be
    sharded; whatever has `state_dict` and `load_state_dict`, such as a scheduler; a dict, a list, a
    tensor or an array, which are filled in place; generators of random numbers. It is the same on
    all ranks, or that of rank 0 counts. `per_rank` is what differs on each, modules and optimizers
    apart; such a run goes on with as many ranks only.

    `run_dir` is the run directory; by default the supervisor's, or else `runs/<script>`.

    After a stop the state is committed, and iterating raises `SystemExit` with 75. Raises
    `UsageError` (also if the ranks are called with different `steps`, `save_every` or `seed`),
    `DataError` or `CheckpointWriteError` with a sentence, which is printed without a traceback.

    From this call to the end of the loop, however it ends, the stop signals come here; then they do
    again what they did before. In another thread than the main one Python traps no signals, and
    only the supervisor's orders stop the loop.

    At a prompt (a notebook, IPython, `python -i`) they come here only while the loop runs. After a
    Ctrl-C the state is committed, and iterating raises `KeyboardInterrupt`; a second one within two
    seconds raises it at once. `run_dir` has no default there.
    """
    todo = Todo(steps, save_every, seed, keep_last)
    entry = Entry("survive", run_dir)
    with entry.guard():
        todo.check()
        device = _device_of(model, optimizer)
        everything = gather(model, optimizer, state or {}, per_rank or {})
        facts: dict[str, object] = {"steps": steps, "save_every": save_every, "seed": seed}
        facts |= {"state": sorted(state or {}), "per_rank": sorted(per_rank or {})}
        session = entry.meet(device, facts)
        watch = Watch(everything, Given(model, optimizer, state or {}, per_rank or {}))
        everything = watch.held_with(everything)
        checkpoints = _open_checkpoints(session, everything, optimizer, todo)
        return Survivor(todo, session, checkpoints, watch)


@dataclass(frozen=True)
class Todo:
    """What a loop is to do: so many `steps`, with a save every `save_every` of them, of which the
    last `keep_last` stay.
    """

    steps: int
    save_every: int
    seed: int
    keep_last: int

    def check(self) -> None:
        """Raise `UsageError` if it cannot be done."""
        least = {"steps": 1, "save_every": 1, "keep_last": 2, "seed": None}
        for name, smallest in least.items():
            given = getattr(self, name)
            if isinstance(given, bool) or not isinstance(given, Integral):
                raise UsageError(f"survive({name}={given!r}): write a whole number")
            if smallest is not None and given < smallest:
                raise UsageError(f"survive({name}={given}): it must be at least {smallest}")


class Survivor:
    """The steps of a loop, to be iterated over once, on every rank."""

    def __init__(
        self, todo: Todo, session: Session, checkpoints: CheckpointManager, watch: Watch
    ) -> None:
        self._todo, self._session, self._begun = todo, session, False
        self._watch = watch
        self.checkpoints = checkpoints
        self._loop = OwnLoop(session, checkpoints, checkpoints.restore())
        watch.restored()
        # Of every optimizer: another one may step other parts of the model.
        self._hook = register_optimizer_step_pre_hook(self._before_optimizer)

    @property
    def train_state(self) -> TrainState:
        """How many steps are done."""
        return self._loop.train_state

    def __iter__(self) -> Iterator[int]:
        if self._begun:
            raise UsageError("survive(...) was iterated over before; call it again to go on")
        self._begun = True
        if at_prompt():
            self._session.trap_signals()
        code: ExitCode | None = None
        try:
            code = yield from self._steps()
        finally:
            self.checkpoints.release_staging()  # nothing waits for that once the hook is gone
            self._hook.remove()
            self._session.give_back(code)
        if code is not ExitCode.COMPLETED:
            if at_prompt() and self._session.shutdown.reason() is StopReason.INTERRUPT:
                raise KeyboardInterrupt
            raise SystemExit(int(code))

    def _steps(self) -> Generator[int, None, ExitCode]:
        """The steps that are left; then how the loop ended."""
        loop, steps = self._loop, self._todo.steps
        loop.begin()
        if self._watch.begin(self._todo.seed, self._session.ranks.world.rank == 0):
            self._session.say("NumPy and random draw other numbers: the number of ranks differs")
        agreed, unchecked = VoteResult(), True
        while loop.train_state.step < steps and not agreed.stop:
            step = loop.train_state.step + 1
            loop.begin_step()
            self._session.seed_step(self._todo.seed, step)
            self._watch.begin_step()
            yield step
            agreed = loop.end_step(step)
            due = step < steps and loop.save_is_due(agreed, step % self._todo.save_every == 0)
            look = self._watch.end_step(due)
            if unchecked:  # the optimizer has its state now
                self.checkpoints.check_state()
                unchecked = False
            elif look:
                self.checkpoints.check_registered()
            if due:
                loop.save(agreed)
        return loop.leave(agreed)

    def _before_optimizer(self, optimizer: Optimizer, *_: object) -> None:
        self._watch.stepped(optimizer)
        self.checkpoints.release_staging()


def _device_of(model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Where the model is. Raises `UsageError` if these are not a model and its optimizer."""
    for name, given, kind in (("model", model, nn.Module), ("optimizer", optimizer, Optimizer)):
        if not isinstance(given, kind):
            home = "torch.nn.Module" if kind is nn.Module else "torch.optim.Optimizer"
            raise UsageError(f"survive({name}={type(given).__name__}): it must be a {home}")
    parameters = list(model.parameters())
    if not parameters:
        raise UsageError("survive(model): it has no parameters, so there is nothing to save")
    return parameters[0].device


def _open_checkpoints(
    session: Session, everything: Everything, optimizer: Optimizer, todo: Todo
) -> CheckpointManager:
    return CheckpointManager(
        session.context(type(optimizer).__name__.lower(), todo.seed),
        everything.model,
        everything.optimizer,
        keep=Keep(todo.keep_last),
        durations=session.durations,
        registered=everything.registered,
    )
