"""`survive`: lets your own training loop stop, save and resume.

    for step, batch in survive(model, optimizer, data=loader, steps=1000, save_every=50):
        ...

Iterating resumes from the newest checkpoint, at its place in the data, votes in every step, saves,
and stops all ranks after the same step. Under `kempner supervise -- COMMAND` the ranks also report
to the supervisor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any, overload

import torch
from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.format.manifest import read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.manager import CheckpointEngine
from kempner.checkpoint.registered.groups import RegisteredState, gather
from kempner.checkpoint.store.retention import Keep
from kempner.checkpoint.store.selection import choose
from kempner.config.sections import CheckpointSection
from kempner.data.serve.draws import key
from kempner.data.serve.places import supply_of
from kempner.run.process.exit_codes import DataError, UsageError
from kempner.training.compute.seeds import given_seed, program_seed
from kempner.training.recognition import describe_optimizer
from kempner.training.session import RunEntry, Session
from kempner.training.survivor import NAME, Batches, LoopPlan, Survivor
from kempner.training.watch.strangers import HeldObjects
from kempner.training.watch.watch import Watch


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
    """Iterate over this instead of `range(1, steps + 1)`: it yields the steps not done yet, each
    with a batch of `data` where that is given.

    Call it once on every rank, after `init_process_group`, when `model` and `optimizer` are final;
    both are loaded from the newest checkpoint, if there is one. A checkpoint is saved every
    `save_every` steps, and the last `keep_last` are kept. Each step begins with torch's generators
    seeded by `seed`, the step and the rank, so that a resumed step draws the same numbers. By
    default that is the seed which rank 0 has given to `torch.manual_seed`; the run keeps it.

    `data` is a `DataLoader`, torchdata's `StatefulDataLoader`, a stream that has a state, or a
    loader that accelerate or Fabric has made of one. After its last batch it begins anew, in
    another order if it shuffles. A resumed run goes on with the next sample, with any number of
    workers and, for a data set with a length, of ranks. With `accumulate`, a step has a list of so
    many batches.

    `state` is what else comes back with a checkpoint, by name: modules and optimizers, which may be
    sharded; whatever has `state_dict` and `load_state_dict`, such as a scheduler; a dict, a list, a
    tensor or an array, which are filled in place; generators of random numbers. It is the same on
    all ranks, or that of rank 0 counts. `per_rank` is what differs on each, modules and optimizers
    apart; such a run goes on with as many ranks only.

    `run_dir` is the run directory; by default the supervisor's, or else `runs/<script>`.
    `accept_changes` names what may differ from the start before, as a refusal tells it.

    After a stop the state is committed, and iterating raises `SystemExit` with 75. A `break` or
    `return` commits, too; the run goes on at the next start, unless `finish` was called. Raises
    `UsageError` (also if the ranks are called with different arguments or data), `DataError` or
    `CheckpointWriteError` with a sentence, which is printed without a traceback.

    From this call to the end of the loop, however it ends, the stop signals come here; then they do
    again what they did before. In another thread than the main one Python traps no signals, and
    only the supervisor's orders stop the loop.

    At a prompt (a notebook, IPython, `python -i`) they come here only while the loop runs. After a
    Ctrl-C the state is committed, and iterating raises `KeyboardInterrupt`; a second one within two
    seconds raises it at once. `run_dir` has no default there.
    """
    todo = LoopRequest(steps, save_every, keep_last, seed, accumulate)
    entry = RunEntry("survive", run_dir, accept_changes)
    with entry.guard():
        todo.check(has_data=data is not None)
        device = device_of("survive", model, optimizer)
        given = {"state": state or {}, "per_rank": per_rank or {}}
        _keep_name_free(data, given)
        everything = gather(model, optimizer, given["state"], given["per_rank"])
        session = entry.meet(device, *_facts(todo, model, optimizer, data, given))
        noise = _agreed_seed(session, seed)
        batches = _open_batches(session, data, todo, noise)
        if batches is not None:
            everything = batches.held_with(everything)
        held = HeldObjects(model, optimizer, given["state"], given["per_rank"], data)
        watch = Watch(everything, held)
        everything = watch.held_with(everything)
        checkpoints = open_checkpoints(session, everything, optimizer, keep_last, noise)
        return Survivor(LoopPlan(steps, save_every, noise), session, checkpoints, batches, watch)


@dataclass(frozen=True)
class LoopRequest:
    """What a loop is to do, as it was asked for."""

    steps: int
    save_every: int
    keep_last: int
    seed: int | None = None
    accumulate: int | None = None

    def check(self, has_data: bool) -> None:
        """Raise `UsageError` if it cannot be done."""
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
    """Raise `UsageError` if an argument of `caller` is no whole number, or less than `smallest`."""
    if isinstance(given, bool) or not isinstance(given, Integral):
        raise UsageError(f"{caller}({name}={given!r}): write a whole number")
    if smallest is not None and given < smallest:
        raise UsageError(f"{caller}({name}={given}): it must be at least {smallest}")


def _facts(
    todo: LoopRequest,
    model: nn.Module,
    optimizer: Optimizer,
    data: Any,
    given: Mapping[str, Mapping[str, object]],
) -> tuple[dict[str, object], dict[str, object]]:
    """What all ranks must agree on; and what the run is, as later starts are compared with it."""
    facts: dict[str, object] = {"steps": todo.steps, "optimizer": describe_optimizer(optimizer)}
    if (seed := given_seed() if todo.seed is None else int(todo.seed)) is not None:
        facts["seed"] = seed
    if data is not None:
        facts["data"] = _describe(data)
    agree_on: dict[str, object] = {
        "steps": todo.steps,
        "save_every": todo.save_every,
        "seed": todo.seed,
    }
    agree_on |= {name: sorted(objects) for name, objects in given.items()}
    agree_on |= {"data": facts.get("data"), "accumulate": todo.accumulate}
    return {**agree_on, **parameters_of(model)}, facts


def parameters_of(model: nn.Module) -> dict[str, object]:
    """The names of the model's parameters, on which all ranks must agree."""
    names = [name for name, _ in model.named_parameters()]
    return {"the model's parameters": f"{len(names)}, {key(*names):x}"}


def _describe(data: Any) -> str:
    """What kind of data it is, and how long."""
    dataset = getattr(data, "dataset", data)
    try:
        return f"{type(dataset).__name__} of {len(dataset)}"
    except TypeError:
        return type(dataset).__name__


def _keep_name_free(data: Any, given: Mapping[str, Mapping[str, object]]) -> None:
    for argument, objects in given.items():
        if data is not None and NAME in objects:
            raise UsageError(
                f"survive({argument}=...): the place in the data comes back by itself; leave "
                f"{NAME!r} out of {argument}, or give it another name"
            )


def _agreed_seed(session: Session, given: int | None) -> int:
    """Rank 0's, of the run's start where the program names none."""
    mine = given if session.ranks.world.rank or given is not None else _seed_of_run(session)
    seed = session.ranks.broadcast(program_seed() if mine is None else int(mine))
    assert isinstance(seed, int)  # rank 0 has told one
    return seed


def _seed_of_run(session: Session) -> int | None:
    """With which it began; None if there is nothing of it yet."""
    folder = CheckpointFolder(session.run.checkpoints)
    step = choose(folder.committed(), folder.latest()) if folder.path.exists() else None
    try:
        return None if step is None else read(folder.step(step), worked=True).identity.seed
    except DataError:  # the restore tells of it, and sets it aside
        return None


def _open_batches(session: Session, data: Any, todo: LoopRequest, seed: int) -> Batches | None:
    if data is None:
        return None
    world = session.ranks.world
    supply = supply_of(data, seed, (world.rank, world.size))
    session.ranks.agree_on(supply.facts)
    return Batches(supply, todo.accumulate)


def device_of(caller: str, model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Where the model is. Raises `UsageError` if these are not a model and its optimizer."""
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
    """The checkpoints of a run that is made with `optimizer` and `seed`."""
    return CheckpointEngine(
        session.context(type(optimizer).__name__.lower(), seed),
        everything.model,
        everything.optimizer,
        keep=Keep(keep_last),
        durations=session.durations,
        registered=everything.registered,
    )
