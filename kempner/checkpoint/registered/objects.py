"""Saves and restores the objects that a program registers by name, besides model and optimizer.

Modules and optimizers are saved tensor by tensor (`composite.py`). Other objects are saved by their
`state_dict`, or directly: a dict, list, tensor, array or random generator.

States are written by `torch.save` and read by `torch.load(weights_only=True)`, so that no code is
executed. NumPy arrays and numbers, sets and deques, which that does not read, are converted."""

from __future__ import annotations

import io
import pickle
import random
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from operator import setitem
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kempner.run.process.exit_codes import DataError, MismatchError, UsageError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_KIND = "kempner:kind"


def encode(value: object, where: str) -> bytes:
    """Serialize the present state of `value`. Raises `UsageError` for types that cannot be saved;
    `where` is the user's expression for it, for the message."""
    buffer = io.BytesIO()
    torch.save(_outward(value, where), buffer)
    return buffer.getvalue()


def decode(content: bytes, where: str) -> Any:
    try:
        return _inward(torch.load(io.BytesIO(content), map_location="cpu", weights_only=True))
    except (pickle.UnpicklingError, RuntimeError, EOFError, KeyError) as error:
        raise DataError(f"{where} cannot be read: {error}") from error


def _outward(value: Any, where: str) -> Any:
    if isinstance(value, Tensor):
        return _tensor(value, where)
    if isinstance(value, np.ndarray | np.generic):
        if value.dtype.hasobject:
            raise _refused(where, "an array of objects")
        kind = "array" if isinstance(value, np.ndarray) else "number"
        content = {"dtype": value.dtype.str, "shape": list(value.shape), "bytes": value.tobytes()}
        return {_KIND: kind, **content}
    if isinstance(value, Mapping):
        pairs = [(_key(key, where), _outward(v, f"{where}[{key!r}]")) for key, v in value.items()]
        return {"kempner:kind": "mapping", "pairs": pairs} if _KIND in value else dict(pairs)
    if isinstance(value, set | frozenset | deque):
        kind = type(value).__name__
        listed = sorted(value, key=repr) if not isinstance(value, deque) else list(value)
        most = {"maxlen": value.maxlen} if isinstance(value, deque) else {}
        return {_KIND: kind, "items": _outward(listed, where), **most}
    if isinstance(value, list | tuple):
        items = [_outward(item, f"{where}[{at}]") for at, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, _PLAIN):
        return value
    raise _refused(where, f"of type {type(value).__name__}")


def _tensor(value: Tensor, where: str) -> Tensor:
    if hasattr(value, "device_mesh"):
        raise _refused(where, "sharded: register the module or optimizer that it belongs to")
    if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise _refused(where, f"a tensor without memory of its own ({value.layout})")
    return value.detach().to("cpu", copy=True).contiguous()


def _key(key: Any, where: str) -> Any:
    if isinstance(key, bool | int | float | str | tuple | type(None)):
        return key
    raise _refused(where, f"a dict with a key of type {type(key).__name__}")


def _refused(where: str, what: str) -> UsageError:
    return UsageError(
        f"{where} is {what}, and a checkpoint only holds tensors, NumPy arrays, numbers, strings "
        "and lists, tuples, sets and dicts of those; leave it out of what state_dict() returns"
    )


def _inward(value: Any) -> Any:
    if isinstance(value, dict):
        if (make := _MAKE.get(value.get(_KIND))) is not None:
            return make(value)
        return {key: _inward(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(map(_inward, value)) if type(value) in (list, tuple) else value
    return value


def _array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    flat = np.frombuffer(value["bytes"], np.dtype(value["dtype"]))
    return flat.reshape(value["shape"]).copy()


_MAKE: dict[object, Callable[[dict[str, Any]], Any]] = {
    "array": _array,
    "number": lambda value: _array(value)[()],
    "mapping": lambda value: {key: _inward(item) for key, item in value["pairs"]},
    "set": lambda value: set(_inward(value["items"])),
    "frozenset": lambda value: frozenset(_inward(value["items"])),
    "deque": lambda value: deque(_inward(value["items"]), value["maxlen"]),
}


@dataclass(frozen=True)
class Held:
    """How an object's state is read (`give`) and restored (`take`). An `automatic` one is saved
    without being registered, and a checkpoint may lack it. `anew` is called instead of `take` if
    the number of ranks has changed: with the state of rank 0 (None if it has none), the step and
    the rank."""

    give: Callable[[], Any]
    take: Callable[[Any], object]
    automatic: bool = False
    anew: Callable[[Any, int, int], object] | None = None


@dataclass(frozen=True)
class RegisteredObjects:
    """Objects by name, with one state for all ranks (rank 0's), or one per rank. `look` raises
    `UsageError` if the program changes objects that are not registered."""

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


NOTHING = RegisteredObjects({}, {})

GROUPS = ".param_groups"  # suffix of the names under which optimizers' groups are saved


def pack(objects: Mapping[str, Held], argument: str) -> bytes:
    """The current states of these objects. Raises `UsageError` as `RegisteredObjects.check`."""
    states = {name: held.give() for name, held in objects.items()}
    return encode(states, argument)


def unpack(
    content: bytes | None, objects: Mapping[str, Held], argument: str, where: str
) -> dict[str, Any]:
    """The saved states of these objects; `content` is None if none were registered. Raises
    `MismatchError` unless the names are the same, and `DataError` for invalid content."""
    states: dict[str, Any] = {} if content is None else decode(content, where)
    wanted = {name for name, held in objects.items() if not held.automatic}
    if wanted - states.keys() or states.keys() - objects.keys():
        raise MismatchError(
            f"the checkpoint was made with {argument}={_listed(states)}, and now there is "
            f"{argument}={_listed(objects)} ({where}): register the same names, or begin a new run"
        )
    return states


def take(states: Mapping[str, Any], objects: Mapping[str, Held]) -> None:
    for name, state in states.items():
        objects[name].take(state)


def _listed(names: Iterable[str]) -> str:
    """The registered names; the groups of an optimizer belong to its name."""
    given = {name.removesuffix(GROUPS) for name in names} - {"optimizer"}
    return "{" + ", ".join(sorted(given)) + "}"


def held(name: str, value: object) -> Held:
    """The accessors of `value`'s state. Raises `UsageError` for an object that cannot be saved."""
    give, take = getattr(value, "state_dict", None), getattr(value, "load_state_dict", None)
    if callable(give) and callable(take):
        return Held(give, take)
    for kind, (get, fill) in _IN_PLACE.items():
        if isinstance(value, kind):
            return Held(partial(get, value), partial(fill, value))
    if isinstance(value, bool | int | float | str | tuple):
        raise UsageError(
            f"state[{name!r}] is the value {value!r}, which cannot be set when the "
            f"run resumes: register a dict that holds it, such as {{{name!r}: {value!r}}}"
        )
    raise UsageError(
        f"state[{name!r}] is of type {type(value).__name__}: give it the methods "
        "state_dict and load_state_dict, or register a dict, a list, a tensor or an array"
    )


def _itself(value: Any) -> Any:
    return value


def _fill_dict(target: Any, saved: Any) -> None:
    target.clear()
    target.update(saved)


def _fill_tensor(tensor: Tensor, saved: Tensor) -> None:
    with torch.no_grad():
        tensor.copy_(saved)


def _set_bits(generator: np.random.Generator, saved: Any) -> None:
    generator.bit_generator.state = saved


_IN_PLACE: dict[type, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    dict: (_itself, _fill_dict),
    list: (_itself, lambda target, saved: setitem(target, slice(None), saved)),
    Tensor: (_itself, _fill_tensor),
    np.ndarray: (_itself, lambda target, saved: setitem(target, ..., saved)),
    torch.Generator: (torch.Generator.get_state, torch.Generator.set_state),
    random.Random: (random.Random.getstate, random.Random.setstate),
    np.random.Generator: (lambda generator: generator.bit_generator.state, _set_bits),
    np.random.RandomState: (
        lambda generator: generator.get_state(legacy=False),
        np.random.RandomState.set_state,
    ),
}
