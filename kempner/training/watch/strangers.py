"""Objects that no checkpoint holds, and whether a loop changes them."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from kempner.checkpoint.registered.groups import is_optimizer_of
from kempner.training.watch.living import (
    Living,
    find_living,
    loses_its_place,
    variable_of,
    within,
)


@dataclass(frozen=True)
class Given:
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
        """All that are held."""
        return [self.optimizer, *(o for o in self.state.values() if isinstance(o, Optimizer))]


class Strangers:
    """Objects that are not held, and whether the loop changes them."""

    def __init__(self, given: Given) -> None:
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

    def begin(self, living: Living) -> None:
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

    def end_step(self, living: Living | None) -> None:
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
        """Each in a sentence."""
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

    def _add(self, living: Living, begun: bool) -> None:
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
        return loses_its_place(iterator) and id(iterator._index_sampler) not in self._held

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
