"""Objects that no checkpoint holds, and whether a loop changes them.

The objects of a process that a loop may change: found among all that Python knows of.
"""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter

from kempner.checkpoint.registered.groups import is_optimizer_of

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
class LiveObjects:
    """What there is of each kind."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    iterators: list[Any] = field(default_factory=list)


def find_living() -> LiveObjects:
    """Look at all objects once: tens of milliseconds."""
    found, kinds = LiveObjects(), dict[type, list[Any] | None]()
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            kinds[kind] = _place_of(kind, found)
        if (place := kinds[kind]) is not None:
            place.append(thing)
    return found


def _place_of(kind: type, found: LiveObjects) -> list[Any] | None:
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


def restarts_order(iterator: Any) -> bool:
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


@dataclass(frozen=True)
class HeldObjects:
    """What the program has given to be held, with all that is within it.

    `watches_data` is whether a loader that is read from step to step counts, of which the program
    may know the place by itself.
    """

    model: nn.Module
    optimizer: Optimizer
    state: Mapping[str, object]
    per_rank: Mapping[str, object]
    data: object = None
    watches_data: bool = True

    @property
    def optimizers(self) -> list[Optimizer]:
        """The optimizers among the held objects."""
        return [self.optimizer, *(o for o in self.state.values() if isinstance(o, Optimizer))]


class UnheldObjects:
    """Objects that are not held, and whether the loop changes them."""

    def __init__(self, given: HeldObjects) -> None:
        self._given = given
        things = [given.model, *given.state.values(), *given.per_rank.values(), given.data]
        held = within([*things, given.optimizer])
        plain = (Tensor, dict, list, tuple)
        self._held = {key: one for key, one in held.items() if not isinstance(one, plain)}
        modules = [thing for thing in held.values() if isinstance(thing, nn.Module)]
        self._tensors = {id(tensor) for module in modules for tensor in module.parameters()}
        # FSDP puts others in the place of theirs.
        self._modules = {id(part) for module in modules for part in module.modules()}
        self._before: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizers: dict[int, tuple[weakref.ref[Optimizer], int, bool]] = {}
        self._counting: dict[int, tuple[weakref.ref[Any], object]] = {}
        self._iterators: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._weights: list[tuple[weakref.ref[Tensor], int, weakref.ref[nn.Module]]] = []
        self._scanned: str | None = None

    def begin(self, living: LiveObjects) -> None:
        """These are there before the first step."""
        self._before.update(living.optimizers)
        for module in living.modules:
            if id(module) in self._modules:
                continue
            for tensor in module._parameters.values():
                if tensor is None or id(tensor) in self._tensors or tensor.is_inference():
                    continue
                own: weakref.ref[Tensor] = weakref.ref(tensor)
                entry = (own, tensor._version, weakref.ref(module))
                self._weights.append(entry)
        self._add(living, begun=True)

    def end_step(self, living: LiveObjects | None) -> None:
        """A step has ended, after which there are these."""
        if self._scanned is None:
            self._scanned = self._read_on()
        if living is not None:
            self._add(living, begun=False)

    def stepped(self, optimizer: Optimizer, step: int) -> None:
        """Any optimizer steps, in a step of the loop."""
        if id(optimizer) in self._held:
            return
        known = self._optimizers.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            lasts = optimizer in self._before
            self._optimizers[id(optimizer)] = (weakref.ref(optimizer), step, lasts)
        elif step != known[1]:
            self._optimizers[id(optimizer)] = (known[0], known[1], True)

    def findings(self) -> Iterator[str]:
        """One sentence for each finding."""
        for reference, _, lasts in self._optimizers.values():
            optimizer = reference()
            if lasts and optimizer is not None and self._matters(optimizer):
                yield _unregistered(optimizer, "steps")
        counting = [(reference(), mark) for reference, mark in self._counting.values()]
        moved = [one for one, mark in counting if one is not None and _mark(one) != mark]
        inner = {id(part) for one in moved for part in getattr(one, "_schedulers", ())}
        for scheduler in sorted(moved, key=lambda one: id(one) in inner):
            yield _unregistered(scheduler, "steps")
        if self._scanned is not None:
            yield self._scanned
        for tensor_reference, version, module_reference in self._weights:
            tensor, module = tensor_reference(), module_reference()
            if tensor is not None and module is not None and tensor._version != version:
                yield _unregistered(_largest_with(module, self._held), "changes")

    def _add(self, living: LiveObjects, begun: bool) -> None:
        held = self._given.optimizers
        counting: list[Any] = [scaler for scaler in living.scalers if scaler.is_enabled()]
        for scheduler in living.schedulers:
            optimizer = getattr(scheduler, "optimizer", None)
            if any(is_optimizer_of(one, optimizer) for one in held):
                counting.append(scheduler)
        for thing in counting:
            if id(thing) not in self._held and id(thing) not in self._counting:
                mark = _mark(thing) if begun else 0
                self._counting[id(thing)] = (weakref.ref(thing), mark)
        for iterator in living.iterators:
            if id(iterator) not in self._iterators and self._is_watched(iterator):
                entry = (weakref.ref(iterator), iterator._num_yielded)
                self._iterators[id(iterator)] = entry

    def _is_watched(self, iterator: Any) -> bool:
        if not self._given.watches_data:
            return False
        return restarts_order(iterator) and id(iterator._index_sampler) not in self._held

    def _read_on(self) -> str | None:
        """Whether an iterator of a loader goes on from one step to the next."""
        for key, (reference, read) in self._iterators.items():
            iterator = reference()
            if iterator is None or iterator._num_yielded == read:
                continue
            self._iterators[key] = (reference, iterator._num_yielded)
            if 0 < iterator._num_yielded < len(iterator):
                return (
                    "the loop reads a DataLoader from step to step, and after a stop it would "
                    "begin with another sample: give the loader to survive(data=...), which "
                    "brings the place back"
                )
        return None

    def _matters(self, optimizer: Optimizer) -> bool:
        """Whether it has anything to lose."""
        if any(is_optimizer_of(one, optimizer) for one in self._given.optimizers):
            return False
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        return bool(optimizer.state) or any(id(p) not in self._tensors for p in trained)


def _unregistered(thing: object, does: str) -> str:
    name, kind = variable_of(thing), type(thing).__name__
    what = f"{name} ({kind})" if name else f"a {kind}"
    key = name if name not in (None, "model", "optimizer") else "NAME"
    return (
        f"{what} {does} in the loop, and no checkpoint holds it, so that it would begin anew after "
        f'a stop: register it, state={{"{key}": {name or "..."}}}'
    )


def _mark(counting: Any) -> object:
    """What of a scheduler or a scaler of gradients changes when it is used."""
    if (epoch := getattr(counting, "last_epoch", None)) is not None:
        return epoch
    return repr(counting.state_dict())


def _largest_with(module: nn.Module, held: Collection[int]) -> nn.Module:
    """The largest of the modules that no checkpoint holds which has this one as a part."""
    whole = [
        other
        for other in find_living().modules
        if id(other) not in held and any(part is module for part in other.modules())
    ]
    named = [other for other in whole if variable_of(other) is not None]
    return max(named or whole, key=lambda other: len([*other.modules()]), default=module)
