"""Sorts what a program wants back: what is held tensor by tensor, and what by its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from kempner.checkpoint.registered.composite import Modules, Optimizers, plainly_named
from kempner.checkpoint.registered.groups import (
    ParameterGroups,
    ParameterNames,
    in_their_order,
)
from kempner.checkpoint.registered.objects import GROUPS, NOTHING, Held, Registered, held
from kempner.run.process.exit_codes import UsageError


@dataclass(frozen=True)
class Everything:
    """All of it, as a `CheckpointEngine` takes it."""

    model: nn.Module
    optimizer: Optimizer
    registered: Registered = NOTHING


def gather(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, object],
    per_rank: Mapping[str, object],
) -> Everything:
    """What a program has given. Raises `UsageError` for what no checkpoint can hold."""
    _check_names(state, per_rank)
    modules = {name: thing for name, thing in state.items() if isinstance(thing, nn.Module)}
    optimizers = {name: thing for name, thing in state.items() if isinstance(thing, Optimizer)}
    others = {n: thing for n, thing in state.items() if n not in modules and n not in optimizers}
    every = {"optimizer": optimizer, **optimizers}
    # Its state is lists of tensors that grow, in the place of its first parameter.
    whole = {name: one for name, one in every.items() if isinstance(one, torch.optim.LBFGS)}
    rest = [one for name, one in every.items() if name not in whole]
    alone = not modules and not optimizers and not whole
    all_modules = plainly_named(model) if alone else Modules(model, modules)
    all_optimizers = optimizer if alone else Optimizers(rest)
    names = ParameterNames(all_modules)
    groups = {n: ParameterGroups(n, one, names, n in whole) for n, one in every.items()}
    shared = {f"{name}{GROUPS}": of_one.held() for name, of_one in groups.items()}
    shared |= {name: Held(one.state_dict, one.load_state_dict) for name, one in whole.items()}
    for name, thing in others.items():
        shared[name] = in_their_order(name, thing, held(name, thing), groups.values())
    own = {name: held(name, thing) for name, thing in per_rank.items()}
    return Everything(model if alone else all_modules, all_optimizers, Registered(shared, own))


def _check_names(state: Mapping[str, object], per_rank: Mapping[str, object]) -> None:
    for name in (*state, *per_rank):
        if not isinstance(name, str) or not name.isidentifier() or name in ("model", "optimizer"):
            raise UsageError(
                f"state: {name!r} is no name for it; take letters, digits and _, and "
                "neither model nor optimizer"
            )
    if both := sorted(state.keys() & per_rank.keys()):
        raise UsageError(f"{both[0]} is in state and in per_rank; leave it in one")
    for name, thing in {**state, **per_rank}.items():
        parts: Iterable[object] = ()
        if isinstance(thing, list | tuple | set | dict):
            parts = thing.values() if isinstance(thing, dict) else thing
        if any(isinstance(part, nn.Module | Optimizer) for part in parts):
            raise UsageError(
                f"state[{name!r}] is a {type(thing).__name__} of modules or "
                "optimizers: register each under a name of its own, by which it comes back"
            )
    for name, thing in per_rank.items():
        if isinstance(thing, nn.Module | Optimizer):
            raise UsageError(
                f"per_rank[{name!r}] is a {type(thing).__name__}: register modules "
                "and optimizers as state, of which each rank may have its shard"
            )
