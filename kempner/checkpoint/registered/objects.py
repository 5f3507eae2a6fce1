"""What a program registers beside model and optimizer, by name, and how each kind is held.

Modules and optimizers are held tensor by tensor (`composite.py`). All else is held by its
`state_dict`, or in place: a dict, a list, a tensor, an array, a generator of random numbers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kempner.checkpoint.registered.values import decode, encode
from kempner.run.process.exit_codes import MismatchError, UsageError


@dataclass(frozen=True)
class Held:
    """How an object gives its state, and takes it back.

    What is `automatic` is held without being registered, and a checkpoint may lack it. `anew` is
    called instead of `take` where another number of ranks goes on: with the state of rank 0 (None
    if it has none), the step and the rank.
    """

    give: Callable[[], Any]
    take: Callable[[Any], object]
    automatic: bool = False
    anew: Callable[[Any, int, int], object] | None = None


@dataclass(frozen=True)
class Registered:
    """Objects by their names: one state for all ranks (rank 0's), and one for each rank.

    `look` raises `UsageError` where a program changes what is not among them.
    """

    shared: Mapping[str, Held]
    per_rank: Mapping[str, Held]
    look: Callable[[], None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self.shared or self.per_rank)

    def check(self) -> None:
        """Raise `UsageError` if a checkpoint cannot hold the state as it is now."""
        self.look()
        for argument, objects in (("state", self.shared), ("per_rank", self.per_rank)):
            for name, held in objects.items():
                encode(held.give(), f"{argument}[{name!r}]")


NOTHING = Registered({}, {})

GROUPS = ".param_groups"
"""How the names end under which the groups of optimizers are held."""


def pack(objects: Mapping[str, Held], argument: str) -> bytes:
    """The states of these objects at this moment. Raises `UsageError` as `Registered.check`."""
    states = {name: held.give() for name, held in objects.items()}
    return encode(states, argument)


def unpack(
    content: bytes | None, objects: Mapping[str, Held], argument: str, where: str
) -> dict[str, Any]:
    """The states that are for these objects; None is what was saved without any.

    Raises `MismatchError` unless the names are the same, and `DataError` for what is no
    such content.
    """
    states: dict[str, Any] = {} if content is None else decode(content, where)
    wanted = {name for name, held in objects.items() if not held.automatic}
    if wanted - states.keys() or states.keys() - objects.keys():
        raise MismatchError(
            f"the checkpoint was made with {argument}={_listed(states)}, and now there is "
            f"{argument}={_listed(objects)} ({where}): register the same names, or begin a new run"
        )
    return states


def take(states: Mapping[str, Any], objects: Mapping[str, Held]) -> None:
    """Give the objects their states back."""
    for name, state in states.items():
        objects[name].take(state)


def _listed(names: Iterable[str]) -> str:
    """As they are registered: the groups of an optimizer are held with it."""
    given = {name.removesuffix(GROUPS) for name in names} - {"optimizer"}
    return "{" + ", ".join(sorted(given)) + "}"


def held(name: str, thing: object) -> Held:
    """How `thing` is held. Raises `UsageError` for what cannot be."""
    give, take = getattr(thing, "state_dict", None), getattr(thing, "load_state_dict", None)
    if callable(give) and callable(take):
        return Held(give, take)
    for kind, way in _IN_PLACE.items():
        if isinstance(thing, kind):
            return way(thing)
    if isinstance(thing, bool | int | float | str | tuple):
        raise UsageError(
            f"state[{name!r}] is the value {thing!r}, which cannot be set when the "
            f"run resumes: register a dict that holds it, such as {{{name!r}: {thing!r}}}"
        )
    raise UsageError(
        f"state[{name!r}] is of type {type(thing).__name__}: give it the methods "
        "state_dict and load_state_dict, or register a dict, a list, a tensor or an array"
    )


def _of_dict(thing: Any) -> Held:
    def take(saved: Any) -> None:
        thing.clear()
        thing.update(saved)

    return Held(lambda: thing, take)


def _of_list(thing: Any) -> Held:
    def take(saved: Any) -> None:
        thing[:] = saved

    return Held(lambda: thing, take)


def _of_tensor(thing: Tensor) -> Held:
    def take(saved: Tensor) -> None:
        with torch.no_grad():
            thing.copy_(saved)

    return Held(lambda: thing, take)


def _of_array(thing: np.ndarray[Any, Any]) -> Held:
    def take(saved: Any) -> None:
        thing[...] = saved

    return Held(lambda: thing, take)


def _of_numpy_generator(thing: np.random.Generator) -> Held:
    def take(saved: Any) -> None:
        thing.bit_generator.state = saved

    return Held(lambda: thing.bit_generator.state, take)


_IN_PLACE: dict[type, Callable[[Any], Held]] = {
    dict: _of_dict,
    list: _of_list,
    Tensor: _of_tensor,
    np.ndarray: _of_array,
    torch.Generator: lambda thing: Held(thing.get_state, thing.set_state),
    random.Random: lambda thing: Held(thing.getstate, thing.setstate),
    np.random.Generator: _of_numpy_generator,
    np.random.RandomState: lambda thing: Held(
        lambda: thing.get_state(legacy=False), thing.set_state
    ),
}
