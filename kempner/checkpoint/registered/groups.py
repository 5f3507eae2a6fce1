"""Saves the parameter groups of an optimizer by the names of their parameters.

So a run may resume with groups, or parameters within a group, in another order. Lists in which a
scheduler has an entry per group are put into the new order."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.registered.composite import Modules, Optimizers, plainly_named
from kempner.checkpoint.registered.objects import GROUPS, NOTHING, Held, RegisteredObjects, held
from kempner.run.process.exit_codes import MismatchError, UsageError

_PARAMETERS = "params"
_BY_THE_PROGRAM = frozenset({_PARAMETERS, "foreach", "fused", "capturable", "differentiable"})
"""Keys that are not restored: how a step is computed, and the parameters themselves."""

_BY_GROUP = frozenset(
    {"base_lrs", "_last_lr", "lr_lambdas", "max_lrs", "min_lrs", "base_momentums", "max_momentums"}
    | {"base_values"}  # of timm
)  # lists of schedulers with an entry per group
_BY_STEP = frozenset({"_milestones", "milestones", "_schedulers", "_schedule_phases"})
"""Other lists of schedulers."""


class ParameterNames:
    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.known: dict[Tensor, str] = {}
        self.look()

    def look(self) -> None:
        self.known = {parameter: name for name, parameter in self._model.named_parameters()}

    @property
    def order(self) -> str:
        """A digest of the parameters' names, in the order of the model."""
        text = "\n".join(self.known.values())
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    def parameter(self, name: str) -> Tensor:
        return next(parameter for parameter, its in self.known.items() if its == name)


class ParameterGroups:
    """The groups of one optimizer, registered as `name`. With `in_order` its state depends on the
    order of the parameters, as that of LBFGS does."""

    def __init__(
        self, name: str, optimizer: Optimizer, names: ParameterNames, in_order: bool = False
    ) -> None:
        self._name, self.optimizer, self._names = name, optimizer, names
        self._in_order = in_order
        self._begun = _partition(self._named())
        self.order: list[int] | None = None
        """For each group, the position of the same group in the checkpoint; None if all are
        unchanged."""
        self.reordered = False
        """Whether the model's parameters are in another order than in the checkpoint."""

    @property
    def parameters(self) -> Iterable[Tensor]:
        """All named parameters, in the order of the model."""
        return self._names.known

    def held(self) -> Held:
        """The accessors for a checkpoint; earlier ones may lack the groups."""
        return Held(self.give, self.take, automatic=True)

    def give(self) -> Any:
        """The state: hyperparameters and parameter names. Raises `UsageError` for a trained
        parameter of no registered module."""
        groups = [
            {k: v for k, v in group.items() if k != _PARAMETERS and not callable(v)}
            | {_PARAMETERS: "\n".join(names)}
            for group, names in zip(self.optimizer.param_groups, self._named(), strict=True)
        ]
        return {"groups": groups, "begun": self._begun, "order": self._names.order}

    def take(self, saved: Any) -> None:
        """Restore the hyperparameters of every parameter. Raises `MismatchError` if the parameters
        of a group had different ones."""
        if isinstance(saved, list):  # of kempner up to 6743c10, without names
            self._take_by_place(saved)
            return
        self.reordered = saved["order"] != self._names.order
        then = [group[_PARAMETERS].splitlines() for group in saved["groups"]]
        if self._in_order and then != self._named():
            raise MismatchError(
                f"{self._name} keeps its state in the order of its parameters, and they are in "
                "another order than in the checkpoint: build it as it was, or begin a new run"
            )
        if saved["begun"] == self._begun and _partition(then) != _partition(self._named()):
            self._regroup(then)
        places = self._places(saved["groups"], then)
        for group, place in zip(self.optimizer.param_groups, places, strict=True):
            _fill(group, saved["groups"][place])
        self.order = None if places == [*range(len(then))] else places

    def _named(self) -> list[list[str]]:
        groups = [group[_PARAMETERS] for group in self.optimizer.param_groups]
        if not all(parameter in self._names.known for group in groups for parameter in group):
            self._names.look()
        known = self._names.known
        for parameter in chain.from_iterable(groups):
            if parameter not in known and parameter.requires_grad:
                raise UsageError(
                    f"{self._name} trains a parameter of shape {tuple(parameter.shape)} that is in "
                    "no module that is held: register its module, "
                    'state={"NAME": module}'
                )
        return [[known[p] for p in group if p in known] for group in groups]

    def _places(self, saved: Sequence[Mapping[str, Any]], then: Sequence[list[str]]) -> list[int]:
        """For each group, the position in the checkpoint of its parameters' hyperparameters."""
        where = {name: place for place, group in enumerate(then) for name in group}
        empty = iter([place for place, group in enumerate(then) if not group])
        return [
            self._place(names, saved, where) if names else next(empty, 0) for names in self._named()
        ]

    def _place(
        self, names: Sequence[str], saved: Sequence[Mapping[str, Any]], where: Mapping[str, int]
    ) -> int:
        if missing := [name for name in names if name not in where]:
            raise MismatchError(
                f"{self._name} trains {missing[0]}, which it did not when the checkpoint was made: "
                "build its groups as they were, or begin a new run"
            )
        first, *others = sorted({where[name] for name in names})
        if not all(_alike(saved[first], saved[other]) for other in others):
            raise MismatchError(
                f"{self._name} has {names[0]} in one group with parameters that had other "
                "hyperparameters when the checkpoint was made: build its groups as they were, or "
                "begin a new run"
            )
        return first

    def _regroup(self, then: Sequence[list[str]]) -> None:
        """Change the groups as the program had changed them after building them."""
        optimizer, left = self.optimizer, [[*names] for names in then]
        kept: list[dict[str, Any]] = []
        for group, names in zip([*optimizer.param_groups], self._named(), strict=True):
            like = max(left, key=lambda other: len({*other} & {*names}), default=[])
            if {*like} & {*names}:
                left.remove(like)
                if {*like} != {*names}:
                    group[_PARAMETERS] = [*map(self._names.parameter, like)]
                kept.append(group)
        optimizer.param_groups[:] = kept
        for names in left:
            optimizer.add_param_group({_PARAMETERS: [*map(self._names.parameter, names)]})

    def _take_by_place(self, saved: Sequence[Mapping[str, Any]]) -> None:
        groups = self.optimizer.param_groups
        if len(saved) != len(groups):
            raise MismatchError(
                f"the checkpoint's optimizer has {len(saved)} groups of parameters, this one "
                f"{len(groups)}: begin a new run"
            )
        for group, values in zip(groups, saved, strict=True):
            _fill(group, values)


def in_their_order(name: str, value: object, held: Held, every: Iterable[ParameterGroups]) -> Held:
    """As `held`, with a scheduler's lists per group put into the order of its optimizer's groups. A
    list with a tensor per parameter is refused if the parameters are in another order."""
    where = f"state[{name!r}]"

    def take(saved: Any) -> None:
        optimizer = getattr(value, "optimizer", None)
        for groups in every:
            if is_optimizer_of(groups.optimizer, optimizer) and groups.order is not None:
                saved = _reordered(saved, groups.order, where)
            if groups.reordered and _goes_by_parameters(saved, groups.parameters):
                raise MismatchError(
                    f"{where} has a list with a tensor for each parameter, and the model has its "
                    "parameters in another order than in the checkpoint: build the model as it "
                    "was, or register a dict of these tensors by name"
                )
        held.take(saved)

    return Held(held.give, take, held.automatic)


def _goes_by_parameters(saved: Any, parameters: Iterable[Tensor]) -> bool:
    """Whether a state has a list with a tensor for each parameter, or each trained one."""
    every = list(parameters)
    counts = {len(every), sum(parameter.requires_grad for parameter in every)} - {0, 1}

    def has_list(value: Any) -> bool:
        if isinstance(value, Mapping):
            return any(map(has_list, value.values()))
        if not isinstance(value, list | tuple):
            return False
        listed = len(value) in counts and all(isinstance(item, Tensor) for item in value)
        return listed or any(map(has_list, value))

    return has_list(saved)


def is_optimizer_of(optimizer: Optimizer, other: object) -> bool:
    """Whether both are the same optimizer, or one wraps the other."""
    return getattr(other, "param_groups", None) is optimizer.param_groups


def _reordered(saved: Any, order: Sequence[int], where: str) -> Any:
    if not isinstance(saved, Mapping):
        return saved
    then, moved = max(order) + 1, dict(saved)
    for key, value in saved.items():
        if key in _BY_STEP and isinstance(value, list):
            moved[key] = [_reordered(item, order, where) for item in value]
        elif isinstance(value, Mapping):
            moved[key] = _reordered(value, order, where)
        elif isinstance(value, list | tuple) and len(value) >= then:
            if key in _BY_GROUP:
                moved[key] = type(value)(value[place] for place in order)
            elif len(value) == then and any(item != value[0] for item in value):
                raise MismatchError(
                    f"{where} keeps {key!r}, which may have an entry for each group of its "
                    "optimizer, and these are in another order than in the checkpoint: build the "
                    "groups as they were"
                )
    return moved


def _fill(group: dict[str, Any], values: Mapping[str, Any]) -> None:
    for key, value in values.items():
        if key in _BY_THE_PROGRAM and key in group:
            continue
        if isinstance(group.get(key), Tensor):
            group[key].copy_(torch.as_tensor(value))
        else:
            group[key] = value


def _alike(first: Mapping[str, Any], second: Mapping[str, Any]) -> bool:
    keys = (first.keys() | second.keys()) - {_PARAMETERS}
    return all(_equal(first.get(key), second.get(key)) for key in keys)


def _equal(first: object, second: object) -> bool:
    if isinstance(first, Tensor) or isinstance(second, Tensor):
        both = isinstance(first, Tensor) and isinstance(second, Tensor)
        return both and torch.equal(first, second)  # type: ignore[arg-type]
    return bool(first == second)


def _partition(groups: Iterable[Iterable[str]]) -> str:
    """A digest of groups, independent of the order of groups and parameters."""
    text = "\n\n".join(sorted("\n".join(sorted(names)) for names in groups))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


@dataclass(frozen=True)
class RegisteredState:
    """The arguments of a `CheckpointEngine`."""

    model: nn.Module
    optimizer: Optimizer
    registered: RegisteredObjects = NOTHING


def gather(
    model: nn.Module,
    optimizer: Optimizer,
    state: Mapping[str, object],
    per_rank: Mapping[str, object],
) -> RegisteredState:
    """Collect the objects that a program registers. Raises `UsageError` for objects that no
    checkpoint can hold."""
    _check_names(state, per_rank)
    modules = {name: value for name, value in state.items() if isinstance(value, nn.Module)}
    optimizers = {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    others = {n: value for n, value in state.items() if n not in modules and n not in optimizers}
    every = {"optimizer": optimizer, **optimizers}
    # LBFGS keeps growing lists of tensors, all in the state of its first parameter.
    whole = {name: one for name, one in every.items() if isinstance(one, torch.optim.LBFGS)}
    rest = [one for name, one in every.items() if name not in whole]
    alone = not modules and not optimizers and not whole
    all_modules = plainly_named(model) if alone else Modules(model, modules)
    all_optimizers = optimizer if alone else Optimizers(rest)
    names = ParameterNames(all_modules)
    groups = {n: ParameterGroups(n, one, names, n in whole) for n, one in every.items()}
    shared = {f"{name}{GROUPS}": of_one.held() for name, of_one in groups.items()}
    shared |= {name: Held(one.state_dict, one.load_state_dict) for name, one in whole.items()}
    for name, value in others.items():
        shared[name] = in_their_order(name, value, held(name, value), groups.values())
    own = {name: held(name, value) for name, value in per_rank.items()}
    return RegisteredState(
        model if alone else all_modules, all_optimizers, RegisteredObjects(shared, own)
    )


def _check_names(state: Mapping[str, object], per_rank: Mapping[str, object]) -> None:
    for name in (*state, *per_rank):
        if not isinstance(name, str) or not name.isidentifier() or name in ("model", "optimizer"):
            raise UsageError(
                f"state: {name!r} is no name for it; take letters, digits and _, and "
                "neither model nor optimizer"
            )
    if both := sorted(state.keys() & per_rank.keys()):
        raise UsageError(f"{both[0]} is in state and in per_rank; leave it in one")
    for name, value in {**state, **per_rank}.items():
        parts: Iterable[object] = ()
        if isinstance(value, list | tuple | set | dict):
            parts = value.values() if isinstance(value, dict) else value
        if any(isinstance(part, nn.Module | Optimizer) for part in parts):
            raise UsageError(
                f"state[{name!r}] is a {type(value).__name__} of modules or "
                "optimizers: register each under a name of its own, by which it comes back"
            )
    for name, value in per_rank.items():
        if isinstance(value, nn.Module | Optimizer):
            raise UsageError(
                f"per_rank[{name!r}] is a {type(value).__name__}: register modules "
                "and optimizers as state, of which each rank may have its shard"
            )
