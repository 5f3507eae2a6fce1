"""The objects of a process that a loop may change: found among all that Python knows of."""

from __future__ import annotations

import gc
import sys
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

_IN_TORCH = (
    data.BatchSampler,
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    data.DistributedSampler,
)
"""Samplers that begin anew with each iterator."""

_SAMPLES = 1000
"""What has more entries has data, and none of the objects that are looked for."""


@dataclass
class Living:
    """What there is of each kind."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    iterators: list[Any] = field(default_factory=list)


def find_living() -> Living:
    """Look at all objects once: tens of milliseconds."""
    found, kinds = Living(), dict[type, list[Any] | None]()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = _place_of(kind, found)
        if (place := kinds[kind]) is not None:
            place.append(thing)
    return found


def _place_of(kind: type, found: Living) -> list[Any] | None:
    if issubclass(kind, Optimizer):
        return found.optimizers
    if issubclass(kind, torch.amp.GradScaler):
        return found.scalers
    if issubclass(kind, nn.Module):
        return found.modules
    if issubclass(kind, _BaseDataLoaderIter):
        return found.iterators
    # Those of timm and others are no LRScheduler.
    methods = all(callable(getattr(kind, name, None)) for name in ("step", "state_dict"))
    if issubclass(kind, LRScheduler) or (methods and kind.__name__.endswith("Scheduler")):
        return found.schedulers
    return None


def within(things: Iterable[object], depth: int = 3) -> dict[int, object]:
    """These objects and what their attributes and containers hold, by `id`."""
    found: dict[int, object] = {}
    layer = list(things)
    for _ in range(depth):
        layer = [thing for thing in layer if id(thing) not in found]
        found |= {id(thing): thing for thing in layer}
        layer = [part for thing in layer for part in _parts(thing)]
    return found | {id(thing): thing for thing in layer}


def _parts(thing: object) -> Iterator[object]:
    if isinstance(thing, dict | list | tuple):
        if len(thing) <= _SAMPLES:
            yield from thing.values() if isinstance(thing, dict) else thing
    elif not isinstance(thing, str | bytes | int | float | torch.Tensor | type):
        yield from getattr(thing, "__dict__", {}).values()


def loses_its_place(iterator: Any) -> bool:
    """Whether a resumed run would begin it anew, at the first sample of its order."""
    sampler = iterator._index_sampler
    while type(sampler) in _IN_TORCH:
        inner = getattr(sampler, "sampler", None)
        if inner is None:
            return True
        sampler = inner
    return False


def variable_of(thing: object) -> str | None:
    """What the program calls it, if a variable of a function that is under way refers to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("kempner."):
            for scope in (frame.f_locals, frame.f_globals):
                if (name := _key_of(thing, scope)) is not None:
                    return name
        frame = frame.f_back
    return None


def _key_of(thing: object, scope: dict[str, Any]) -> str | None:
    named: Collection[tuple[str, Any]] = list(scope.items())
    return next((name for name, value in named if value is thing and name.isidentifier()), None)
