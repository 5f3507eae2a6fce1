"""The program's own variables at the beginning of a step: what could have to come back.

Looked at are the variables of the program's functions that wait for the step to end, the globals of
its modules, and what they lead to: modules, optimizers, schedulers, generators, numbers, containers
and objects of the program's classes.
"""

from __future__ import annotations

import random
import sys
import sysconfig
from collections import deque
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

import kempner
from kempner.training.rehearsal.digest import of_state, of_tensor

DEEPEST = 5
"""How many steps from a variable to what it leads to."""

MOST = 4000
"""Entries in all: a program that has more is looked at as far as that."""

MOST_OF_ONE = 64
"""Entries of one container that are looked at one by one."""

Seen = tuple[str, str, str]
"""Its kind, a digest, and a few words for a person."""

_PLAIN = (bool, int, float, complex, str, bytes, type(None))
_SCHEDULERS = (torch.optim.lr_scheduler.LRScheduler,)


def library_paths() -> tuple[str, ...]:
    """Where the code lies that is not the program's."""
    paths = sysconfig.get_paths()
    names = ("stdlib", "platstdlib", "purelib", "platlib")
    return tuple({f"{paths[name]}/" for name in names} | {f"{Path(kempner.__file__).parent}/"})


_LIBRARIES = library_paths()


@cache
def is_programs(file: str | None) -> bool:
    """Whether a source file is the program's own."""
    if not file:
        return False
    path = str(Path(file).absolute())  # as in `python train.py`
    if path.startswith(_LIBRARIES):
        return False
    if "/site-packages/" in path or "/dist-packages/" in path:  # of another environment
        return False
    return path.endswith(".py") and Path(path).is_file()


def _is_programs_class(kind: type[Any]) -> bool:
    known = _KNOWN_CLASSES.get(kind)
    if known is None:
        known = _KNOWN_CLASSES[kind] = _derives_from_programs(kind)
    return known


_KNOWN_CLASSES: dict[type[Any], bool] = {}


def _derives_from_programs(kind: type[Any]) -> bool:
    return any(_is_programs_own(base) for base in kind.__mro__)


def _is_programs_own(kind: type[Any]) -> bool:
    module = sys.modules.get(kind.__module__)
    return kind.__module__ == "__main__" or is_programs(getattr(module, "__file__", None))


def look(frame: FrameType) -> Walk:
    """All variables of the program, as seen from a call that it has made."""
    walk = Walk()
    modules: dict[str, Mapping[str, Any]] = {}
    at: FrameType | None = frame
    while at is not None:
        code = at.f_code
        if is_programs(code.co_filename):
            walk.files.add(str(Path(code.co_filename).resolve()))
            if at.f_locals is not at.f_globals:
                walk.all_of("", at.f_locals)
            modules.setdefault(code.co_filename, at.f_globals)
        else:
            for value in list(at.f_locals.values()):
                if isinstance(value, nn.Module | Optimizer) or _is_programs_class(type(value)):
                    walk.visit(type(value).__name__, value, 0)
        at = at.f_back
    for variables in modules.values():
        walk.all_of("", variables)
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if is_programs(file) and file not in modules:
            walk.files.add(str(Path(str(file)).resolve()))
            walk.all_of(f"{name.rpartition('.')[2]}.", vars(module))
    return walk


class Walk:
    """Visits what variables lead to, each object once."""

    def __init__(self) -> None:
        self.found: dict[str, Seen] = {}
        self.names: dict[int, str] = {}
        """What the objects that were met are called, by `id`."""
        self.files: set[str] = set()
        self.iterators: list[str] = []
        """What has a place that cannot be looked at."""

    def all_of(self, prefix: str, variables: Mapping[str, Any]) -> None:
        """Visit variables that belong together."""
        for name, value in list(variables.items()):
            if not name.startswith("__") and not isinstance(value, ModuleType | type):
                self.visit(f"{prefix}{name}", value, 0)

    def visit(self, name: str, value: Any, depth: int) -> None:
        """Note what `value` is, and what it leads to."""
        if depth > DEEPEST or len(self.found) >= MOST:
            return
        if isinstance(value, _PLAIN):
            self.found.setdefault(name, ("value", repr(value), _short(value)))
            return
        if id(value) in self.names:
            return
        self.names[id(value)] = name
        if isinstance(value, Mapping):
            self._mapping(name, value, depth)
        elif isinstance(value, list | tuple | deque | set | frozenset):
            self._sequence(name, value, depth)
        elif isinstance(value, nn.Module):
            self._module(name, value, depth)
        elif isinstance(value, Optimizer):
            self._optimizer(name, value)
        elif (seen := _leaf(value)) is not None:
            self.found[name] = seen
        else:
            self._object(name, value, depth)

    def _mapping(self, name: str, value: Mapping[Any, Any], depth: int) -> None:
        self.found[name] = ("container", _digest_of(value), f"{len(value)} entries")
        if len(value) <= MOST_OF_ONE:
            for key, entry in list(value.items()):
                self._entry(f"{name}[{key!r}]", entry, depth)

    def _sequence(self, name: str, value: Any, depth: int) -> None:
        entries = list(value)
        kind = "set" if isinstance(value, set | frozenset) else "container"
        self.found[name] = (kind, _digest_of(entries), f"{len(entries)} entries")
        if len(entries) <= MOST_OF_ONE:
            for number, entry in enumerate(entries):
                self._entry(f"{name}[{number}]", entry, depth)

    def _entry(self, name: str, value: Any, depth: int) -> None:
        """An entry of a container, whose digest covers what is plain."""
        if not isinstance(value, (*_PLAIN, Tensor, np.ndarray)):
            self.visit(name, value, depth + 1)

    def _module(self, name: str, module: nn.Module, depth: int) -> None:
        tensors = list(_tensors_of(module))
        self.found[f"{name}.names"] = ("names", of_state([of for of, _, _ in tensors]), "")
        for of, kind, tensor in tensors:
            self.found[f"{name}.{of}"] = (kind, of_tensor(tensor), str(tuple(tensor.shape)))
            self.names.setdefault(id(tensor), f"{name}.{of}")
        for place, part in module.named_modules():
            self.names.setdefault(id(part), f"{name}.{place}")
            if _is_programs_class(type(part)):
                own = f"{name}.{place}".rstrip(".")
                self._attributes(own, part, depth)

    def _optimizer(self, name: str, optimizer: Optimizer) -> None:
        state = [optimizer.state.get(p) for g in optimizer.param_groups for p in g["params"]]
        self.found[name] = ("optimizer", of_state(state), type(optimizer).__name__)
        groups = [{k: v for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        rates = ", ".join(f"{float(group.get('lr', 0)):.4g}" for group in groups)
        self.found[f"{name}.param_groups"] = ("groups", of_state(groups), rates)

    def _object(self, name: str, value: Any, depth: int) -> None:
        if isinstance(value, DataLoader):
            self.iterators.append(name)
            for attribute in ("generator", "sampler", "dataset"):
                self.visit(f"{name}.{attribute}", getattr(value, attribute), depth + 1)
        elif hasattr(type(value), "__next__"):
            self.iterators.append(name)
        elif _is_programs_class(type(value)):
            self._attributes(name, value, depth)
        elif hasattr(type(value), "state_dict") and hasattr(type(value), "load_state_dict"):
            self.found[name] = ("object", of_state(value.state_dict()), type(value).__name__)

    def _attributes(self, name: str, value: Any, depth: int) -> None:
        # A class may say what an attribute is at first: `seen = 0`, and later `self.seen += 1`.
        own = [vars(kind) for kind in reversed(type(value).__mro__) if _is_programs_own(kind)]
        first = {n: v for names in own for n, v in names.items() if isinstance(v, _PLAIN)}
        held = {name: first[name] for name in first if not name.startswith("__")}
        for attribute, entry in {**held, **getattr(value, "__dict__", {})}.items():
            if attribute in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
                continue
            if not callable(entry) or isinstance(entry, nn.Module):
                self.visit(f"{name}.{attribute}", entry, depth + 1)


def _tensors_of(module: nn.Module) -> Iterator[tuple[str, str, Tensor]]:
    for name, parameter in module.named_parameters():
        yield name, "weight", parameter
    for name, buffer in module.named_buffers():
        yield name, "buffer", buffer


def _leaf(value: Any) -> Seen | None:
    """What a value is that leads to nothing else; None if it may."""
    if isinstance(value, Tensor):
        return "tensor", of_tensor(value), _short(value)
    if isinstance(value, np.ndarray | np.generic):
        return "tensor", of_state(np.asarray(value)), str(value.shape)
    if isinstance(value, torch.Generator):
        return "generator", of_tensor(value.get_state()), "torch.Generator"
    if isinstance(value, random.Random):
        return "generator", of_state(value.getstate()), "random.Random"
    if isinstance(value, np.random.Generator):
        return "generator", of_state(value.bit_generator.state), "numpy Generator"
    if isinstance(value, np.random.RandomState):
        return "generator", of_state(value.get_state()), "numpy RandomState"
    if isinstance(value, _SCHEDULERS):
        return "scheduler", of_state(value.state_dict()), type(value).__name__
    return None


def _digest_of(value: Any) -> str:
    """Of what is plain in a container; what is not is visited by itself."""
    return of_state(value)


def _short(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{value.item():.6g}" if value.numel() == 1 else str(tuple(value.shape))
    text = f"{value:.6g}" if isinstance(value, float) else repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
