"""Finds objects that a loop changes and no checkpoint holds, among all objects of the process.

    watch = Watch(everything, given)
    everything = watch.held_with(everything)
    watch.restored()                       # the newest checkpoint is loaded
    watch.begin(seed)                      # the loop begins
    watch.begin_step(); watch.stepped(optimizer); watch.end_step()

A finding is raised as `UsageError` at the next check of the state: after the first step, at the
first save, or at a later one. Each step costs a few comparisons.

Also holds the global random number generators, and gradients if an optimizer has not stepped since,
as when accumulating over several steps of the loop, or if they are not zeroed before the next
backward pass.
"""

from __future__ import annotations

import gc
import random
import sys
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import data
from torch.utils.data.dataloader import _BaseDataLoaderIter
from torch.utils.hooks import RemovableHandle
from xxhash import xxh3_64

from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.groups import ParameterNames, RegisteredState, is_optimizer_of
from kempner.checkpoint.registered.objects import Held
from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.run.process.exit_codes import MismatchError, UsageError
from kempner.training.compute.forward_backward import set_rng

_IN_TORCH = (
    data.BatchSampler,
    data.RandomSampler,
    data.SequentialSampler,
    data.SubsetRandomSampler,
    data.WeightedRandomSampler,
    data.DistributedSampler,
)
"""Samplers that start over with each iterator."""

_SAMPLES = 1000
"""Larger containers hold data, and are not searched."""


@dataclass
class LiveObjects:
    """The living objects of each kind."""

    optimizers: list[Optimizer] = field(default_factory=list)
    schedulers: list[Any] = field(default_factory=list)
    scalers: list[torch.amp.GradScaler] = field(default_factory=list)
    modules: list[nn.Module] = field(default_factory=list)
    iterators: list[Any] = field(default_factory=list)


def find_living() -> LiveObjects:
    """Scan all objects of the process, which takes tens of milliseconds."""
    found, kinds = LiveObjects(), dict[type, list[Any] | None]()
    for instance in gc.get_objects():
        kind = type(instance)
        if kind not in kinds:
            kinds[kind] = _place_of(kind, found)
        if (place := kinds[kind]) is not None:
            place.append(instance)
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
    # Schedulers of timm and others are not subclasses of LRScheduler.
    methods = all(callable(getattr(kind, name, None)) for name in ("step", "state_dict"))
    if issubclass(kind, LRScheduler) or (methods and kind.__name__.endswith("Scheduler")):
        return found.schedulers
    return None


def within(objects: Iterable[object], depth: int = 3) -> dict[int, object]:
    """These objects and what their attributes and containers hold, by `id`."""
    found: dict[int, object] = {}
    layer = list(objects)
    for _ in range(depth):
        layer = [instance for instance in layer if id(instance) not in found]
        found |= {id(instance): instance for instance in layer}
        layer = [part for instance in layer for part in _parts(instance)]
    return found | {id(instance): instance for instance in layer}


def _parts(container: object) -> Iterator[object]:
    if isinstance(container, dict | list | tuple):
        if len(container) <= _SAMPLES:
            yield from container.values() if isinstance(container, dict) else container
    elif not isinstance(container, str | bytes | int | float | torch.Tensor | type):
        yield from getattr(container, "__dict__", {}).values()


def restarts_order(iterator: Any) -> bool:
    """Whether a resumed run would restart this iterator at the first sample of its order."""
    sampler = iterator._index_sampler
    while type(sampler) in _IN_TORCH:
        inner = getattr(sampler, "sampler", None)
        if inner is None:
            return True
        sampler = inner
    return False


def variable_of(target: object) -> str | None:
    """The program's name of an object, if a variable of an active function refers to it."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if not frame.f_globals.get("__name__", "").startswith("kempner."):
            for scope in (frame.f_locals, frame.f_globals):
                for name, value in list(scope.items()):
                    if value is target and name.isidentifier():
                        return name
        frame = frame.f_back
    return None


@dataclass(frozen=True)
class HeldObjects:
    """The objects that the program has registered. `watches_data`: report a loader that is read
    from step to step; False if the program may restore its position itself."""

    model: nn.Module
    optimizer: Optimizer
    state: Mapping[str, object]
    per_rank: Mapping[str, object]
    data: object = None
    watches_data: bool = True

    @property
    def optimizers(self) -> list[Optimizer]:
        return [self.optimizer, *(o for o in self.state.values() if isinstance(o, Optimizer))]


class UnheldObjects:
    """Objects that no checkpoint holds, and whether the loop changes them."""

    def __init__(self, given: HeldObjects) -> None:
        self._given = given
        registered = [given.model, *given.state.values(), *given.per_rank.values(), given.data]
        held = within([*registered, given.optimizer])
        plain = (Tensor, dict, list, tuple)
        self._held = {key: one for key, one in held.items() if not isinstance(one, plain)}
        modules = [instance for instance in held.values() if isinstance(instance, nn.Module)]
        self._tensors = {id(tensor) for module in modules for tensor in module.parameters()}
        # FSDP replaces their parameters.
        self._modules = {id(part) for module in modules for part in module.modules()}
        self._before: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._optimizers: dict[int, tuple[weakref.ref[Optimizer], int, bool]] = {}
        self._counting: dict[int, tuple[weakref.ref[Any], object]] = {}
        self._iterators: dict[int, tuple[weakref.ref[Any], int]] = {}
        self._weights: list[tuple[weakref.ref[Tensor], int, weakref.ref[nn.Module]]] = []
        self._scanned: str | None = None

    def begin(self, living: LiveObjects) -> None:
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
        if self._scanned is None:
            self._scanned = self._read_on()
        if living is not None:
            self._add(living, begun=False)

    def stepped(self, optimizer: Optimizer, step: int) -> None:
        if id(optimizer) in self._held:
            return
        known = self._optimizers.get(id(optimizer))
        if known is None or known[0]() is not optimizer:
            lasts = optimizer in self._before
            self._optimizers[id(optimizer)] = (weakref.ref(optimizer), step, lasts)
        elif step != known[1]:
            self._optimizers[id(optimizer)] = (known[0], known[1], True)

    def findings(self) -> Iterator[str]:
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
        for counter in counting:
            if id(counter) not in self._held and id(counter) not in self._counting:
                mark = _mark(counter) if begun else 0
                self._counting[id(counter)] = (weakref.ref(counter), mark)
        for iterator in living.iterators if self._given.watches_data else ():
            new = id(iterator) not in self._iterators
            if new and restarts_order(iterator) and id(iterator._index_sampler) not in self._held:
                entry = (weakref.ref(iterator), iterator._num_yielded)
                self._iterators[id(iterator)] = entry

    def _read_on(self) -> str | None:
        """A finding if a loader's iterator is read from one step to the next."""
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
        """Whether the optimizer has state, or trains parameters, that no checkpoint holds."""
        if any(is_optimizer_of(one, optimizer) for one in self._given.optimizers):
            return False
        trained = [p for group in optimizer.param_groups for p in group["params"]]
        return bool(optimizer.state) or any(id(p) not in self._tensors for p in trained)


def _unregistered(instance: object, does: str) -> str:
    name, kind = variable_of(instance), type(instance).__name__
    what = f"{name} ({kind})" if name else f"a {kind}"
    key = name if name not in (None, "model", "optimizer") else "NAME"
    return (
        f"{what} {does} in the loop, and no checkpoint holds it, so that it would begin anew after "
        f'a stop: register it, state={{"{key}": {name or "..."}}}'
    )


def _mark(counting: Any) -> object:
    """The part of a scheduler or gradient scaler that changes with use."""
    if (epoch := getattr(counting, "last_epoch", None)) is not None:
        return epoch
    return repr(counting.state_dict())


def _largest_with(module: nn.Module, held: Collection[int]) -> nn.Module:
    """The largest module around this one that no checkpoint holds."""
    whole = [
        other
        for other in find_living().modules
        if id(other) not in held and any(part is module for part in other.modules())
    ]
    named = [other for other in whole if variable_of(other) is not None]
    return max(named or whole, key=lambda other: len([*other.modules()]), default=module)


GRADIENTS = "kept.gradients"
"""Their key in a checkpoint; no program can register such a name."""


class KeptGradients:
    """The gradients of the parameters of `optimizers`; `names` are the parameters' names."""

    def __init__(self, optimizers: Sequence[Optimizer], names: ParameterNames) -> None:
        self._optimizers, self._names = optimizers, names
        self._stepped: set[int] = set()
        self._probes = [probe for one in optimizers if (probe := _Probe.of(one)) is not None]
        self._saved: dict[str, Tensor] = {}

    def held(self) -> Held:
        """Their entry in a checkpoint; earlier checkpoints have none."""
        return Held(self._give, self._take, automatic=True, anew=self._refuse_others)

    def begin(self) -> None:
        """Restore the saved gradients."""
        named = {name: parameter for parameter, name in self._names.known.items()}
        for name, saved in self._saved.items():
            parameter = named[name]
            local = saved.to(local_part(parameter).device)
            parameter.grad = _like(parameter, local)
        self._saved = {}
        for probe in self._probes:
            probe.begin()

    def begin_step(self) -> None:
        self._stepped.clear()

    def stepped(self, optimizer: Optimizer) -> None:
        self._stepped.add(id(optimizer.param_groups))

    def end_step(self) -> None:
        """Check whether a backward pass has added to existing gradients."""
        for probe in self._probes:
            probe.end_step()

    def stop_looking(self) -> None:
        """End the checks: later steps do as the first ones."""
        for probe in self._probes:
            probe.close()

    def _give(self) -> dict[str, Tensor]:
        kept = {id(p.optimizer) for p in self._probes if p.adds or not p.decided}
        return {
            self._names.known[parameter]: local_part(parameter.grad)
            for optimizer in self._optimizers
            if id(optimizer.param_groups) not in self._stepped or id(optimizer) in kept
            for group in optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None and parameter in self._names.known
        }

    def _take(self, saved: dict[str, Tensor]) -> None:
        self._saved = saved

    def _refuse_others(self, saved: Any, step: int, rank: int) -> None:
        if saved:
            raise MismatchError(
                f"the checkpoint of step {step} was made while each rank added up its gradients, "
                "which cannot be divided among another number of ranks: start as many ranks again, "
                "or let survive(data=..., accumulate=...) make a step of such batches"
            )


class _Probe:
    """Finds by one parameter of an optimizer whether a backward pass adds to gradients that a step
    has left."""

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        self.optimizer, self._parameter = optimizer, parameter
        self.adds, self.decided = False, False
        """Whether one has added, and whether any could have."""
        self._left: Tensor | None = None
        self._hook: RemovableHandle | None = None
        if not is_sharded(parameter):  # otherwise another tensor is differentiated
            self._hook = parameter.register_hook(self._before_adding)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Probe | None:
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        smallest = min(trained, key=lambda parameter: parameter.numel(), default=None)
        return None if smallest is None else cls(optimizer, smallest)

    def begin(self) -> None:
        """Note the gradient that the last step has left."""
        self._left = self._parameter.grad

    def end_step(self) -> None:
        now = self._parameter.grad
        if self._hook is None and self._left is not None:
            self.adds, self.decided = self.adds or now is self._left, True
        self._left = now

    def close(self) -> None:
        if self._hook is not None:
            self._hook.remove()
        self._left = None

    def _before_adding(self, _: Tensor) -> None:
        left, self._left = self._left, None
        if left is None:
            return
        self.decided = True
        if self._parameter.grad is left and bool(left.count_nonzero()):
            self.adds = True


def _like(parameter: Tensor, local: Tensor) -> Tensor:
    """A gradient with this rank's `local` part."""
    if not is_sharded(parameter):
        return local
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


GENERATORS = "random.generators"
"""Under which they are held: no name that a program could register."""


class GlobalGenerators:
    """The global generators of `random` and NumPy; with `torchs` also torch's, if no step seeds
    them. They are restored as the loop begins: numbers drawn before it are the same at each
    start."""

    def __init__(self, torchs: bool = False) -> None:
        self._torchs = torchs
        self._saved: dict[str, Any] | None = None
        self._anew: tuple[int, int] | None = None

    def held(self) -> Held:
        """Their entry in a checkpoint; earlier checkpoints have none."""
        return Held(self._give, self._take, automatic=True, anew=self._draw_anew)

    def begin(self, seed: int) -> bool:
        """Continue their sequences; returns whether they get new seeds instead, since the number of
        ranks differs."""
        if self._saved is not None:
            random.setstate(self._saved["random"])
            np.random.set_state(self._saved["numpy"])
            if self._torchs and "torch" in self._saved:  # missing in checkpoints of `survive`
                torch.set_rng_state(self._saved["torch"])
                if self._saved["cuda"] is not None and torch.cuda.is_available():
                    torch.cuda.set_rng_state(self._saved["cuda"])
        elif self._anew is not None:
            entropy = np.random.SeedSequence([seed % 2**64, *self._anew])
            ours, numpys = entropy.generate_state(2)
            random.seed(int(ours))
            np.random.seed(int(numpys))
            if self._torchs:
                step, rank = self._anew
                set_rng(seed, step, 0, rank)
        return self._anew is not None

    def _give(self) -> dict[str, Any]:
        states = {"random": random.getstate(), "numpy": np.random.get_state(legacy=False)}
        if not self._torchs:
            return states
        on_gpu = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
        cuda = torch.cuda.get_rng_state() if on_gpu else None
        return {**states, "torch": torch.get_rng_state(), "cuda": cuda}

    def _take(self, saved: dict[str, Any]) -> None:
        self._saved, self._anew = saved, None

    def _draw_anew(self, saved: Any, step: int, rank: int) -> None:
        self._saved, self._anew = None, (step, rank)


LOOKS = 3
"""Least number of steps that are checked from the start of a loop."""

_SMALL, _FEW = 1 << 16, 64
"""Most elements of a tensor, and most tensors, that are checked to stay as they were loaded."""


class Watch:
    """The watch of one loop, on every rank."""

    def __init__(self, everything: RegisteredState, given: HeldObjects) -> None:
        self._given, self._model = given, plainly_named(everything.model)
        self._generators = GlobalGenerators()
        names = ParameterNames(self._model)
        self._gradients = KeptGradients(given.optimizers, names)
        self._strangers = UnheldObjects(given)
        self._loaded: dict[str, int] = {}
        self._early: str | None = None
        self._steps, self._saved, self._looking = 0, False, True

    def held_with(self, everything: RegisteredState) -> RegisteredState:
        own = {
            GENERATORS: self._generators.held(),
            GRADIENTS: self._gradients.held(),
        }
        objects = everything.registered
        registered = replace(objects, per_rank={**objects.per_rank, **own}, look=self.look)
        return replace(everything, registered=registered)

    def restored(self) -> None:
        """Note the state after the restore, or at the beginning of the run."""
        self._loaded = _digests(self._model)

    def begin(self, seed: int, first_rank: bool) -> bool:
        """Begin the loop; returns whether NumPy's and `random`'s generators get new seeds."""
        if first_rank:  # other ranks may have received its weights since
            now = _digests(self._model)
            changed = [n for n, digest in self._loaded.items() if now.get(n, digest) != digest]
            self._early = changed[0] if changed else None
        self._gradients.begin()
        self._strangers.begin(find_living())
        return self._generators.begin(seed)

    def begin_step(self) -> None:
        self._gradients.begin_step()

    def stepped(self, optimizer: Optimizer) -> None:
        self._gradients.stepped(optimizer)
        self._strangers.stepped(optimizer, self._steps)

    def end_step(self, save: bool) -> bool:
        """End a step, possibly before a `save`; returns whether to `look`, the same on all
        ranks."""
        self._steps += 1
        if not self._looking:
            return False
        self._gradients.end_step()
        self._strangers.end_step(find_living() if save or self._steps == 1 else None)
        self._saved = self._saved or save
        if self._steps >= LOOKS and self._saved:
            self._gradients.stop_looking()
            self._looking = False
        return save or self._steps <= LOOKS

    def look(self) -> None:
        """Raise `UsageError` if the loop changes what no checkpoint holds."""
        if self._early is not None:
            raise UsageError(
                f"{self._early} was changed between survive() and the loop, where that would "
                "overwrite what a checkpoint has brought back: do it before survive()"
            )
        for finding in self._strangers.findings():
            raise UsageError(finding)


def _digests(model: nn.Module) -> dict[str, int]:
    """Digests of the first small tensors of a model."""
    small: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        if len(small) >= _FEW:
            break
        if isinstance(tensor, Tensor) and not is_sharded(tensor) and tensor.numel() <= _SMALL:
            content = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
            small[name] = xxh3_64(content.numpy().data).intdigest()
    return small
