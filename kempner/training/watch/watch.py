"""Notices what a loop changes and no checkpoint would hold.

    watch = Watch(everything, given)
    everything = watch.held_with(everything)
    watch.restored()                       # the newest checkpoint is loaded
    watch.begin(seed)                      # the loop begins
    watch.begin_step(); watch.stepped(optimizer); watch.end_step()

What it finds is a `UsageError` of the next look at the state: after the first step, by the first
save, or with a later save. Each step costs it a few comparisons.

Gradients that a loop does not use in the step that has computed them.

They are held where an optimizer has not stepped since, as in an accumulation over several steps of
the loop, and where they are found not to be zeroed before the next backward pass.

The global generators of random numbers, which each rank's checkpoints hold.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle
from xxhash import xxh3_64

from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.groups import ParameterNames, RegisteredState
from kempner.checkpoint.registered.objects import Held
from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.run.process.exit_codes import MismatchError, UsageError
from kempner.training.compute.seeds import set_rng
from kempner.training.watch.strangers import HeldObjects, UnheldObjects, find_living

GRADIENTS = "kept.gradients"
"""Under which they are held: no name that a program could register."""


class KeptGradients:
    """The gradients of what `optimizers` train; `names` are those of their parameters."""

    def __init__(self, optimizers: Sequence[Optimizer], names: ParameterNames) -> None:
        self._optimizers, self._names = optimizers, names
        self._stepped: set[int] = set()
        self._probes = [probe for one in optimizers if (probe := _Probe.of(one)) is not None]
        self._saved: dict[str, Tensor] = {}

    def held(self) -> Held:
        """How a checkpoint holds them; earlier ones do not."""
        return Held(self._give, self._take, automatic=True, anew=self._refuse_others)

    def begin(self) -> None:
        """Put back those that were saved."""
        named = {name: parameter for parameter, name in self._names.known.items()}
        for name, saved in self._saved.items():
            parameter = named[name]
            local = saved.to(local_part(parameter).device)
            parameter.grad = _like(parameter, local)
        self._saved = {}
        for probe in self._probes:
            probe.begin()

    def begin_step(self) -> None:
        """Another step of the loop begins."""
        self._stepped.clear()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self._stepped.add(id(optimizer.param_groups))

    def end_step(self) -> None:
        """Look whether gradients that were there before have been added to."""
        for probe in self._probes:
            probe.end_step()

    def stop_looking(self) -> None:
        """What the first steps did not do, later ones do not."""
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
    """Watches one parameter of an optimizer: does a backward pass add to what a step has left?"""

    def __init__(self, optimizer: Optimizer, parameter: Tensor) -> None:
        self.optimizer, self._parameter = optimizer, parameter
        self.adds, self.decided = False, False
        """Whether one has, and whether any could have."""
        self._left: Tensor | None = None
        self._hook: RemovableHandle | None = None
        if not is_sharded(parameter):  # else another tensor is differentiated
            self._hook = parameter.register_hook(self._before_adding)  # type: ignore[no-untyped-call]

    @classmethod
    def of(cls, optimizer: Optimizer) -> _Probe | None:
        trained = [p for g in optimizer.param_groups for p in g["params"] if p.requires_grad]
        smallest = min(trained, key=lambda parameter: parameter.numel(), default=None)
        return None if smallest is None else cls(optimizer, smallest)

    def begin(self) -> None:
        """What is there now was left by the step before."""
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
    """A gradient of which this rank has the `local` part."""
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
    """Those of `random` and NumPy; with `torchs` those of torch, too, where no step seeds them.

    They come back as the loop begins: what a program draws before it, it draws at each start.
    """

    def __init__(self, torchs: bool = False) -> None:
        self._torchs = torchs
        self._saved: dict[str, Any] | None = None
        self._anew: tuple[int, int] | None = None

    def held(self) -> Held:
        """How a checkpoint holds them; earlier ones do not."""
        return Held(self._give, self._take, automatic=True, anew=self._draw_anew)

    def begin(self, seed: int) -> bool:
        """Continue their sequences; whether they begin anew, since the number of ranks differs."""
        if self._saved is not None:
            random.setstate(self._saved["random"])
            np.random.set_state(self._saved["numpy"])
            if self._torchs and "torch" in self._saved:  # not where `survive` has saved
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
"""Steps from the start of a loop, at least, after which it is looked at what they have done."""

_SMALL, _FEW = 1 << 16, 64
"""Elements of the tensors, and how many of them, that must stay as they were loaded."""


class Watch:
    """Of one loop, on every rank."""

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
        """With what is held without being registered."""
        own = {
            GENERATORS: self._generators.held(),
            GRADIENTS: self._gradients.held(),
        }
        objects = everything.registered
        registered = replace(objects, per_rank={**objects.per_rank, **own}, look=self.look)
        return replace(everything, registered=registered)

    def restored(self) -> None:
        """The state is as the newest checkpoint has it, or at its beginning."""
        self._loaded = _digests(self._model)

    def begin(self, seed: int, first_rank: bool) -> bool:
        """The loop begins; whether NumPy's and `random`'s numbers begin anew with it."""
        if first_rank:  # the others may have been given its weights since
            now = _digests(self._model)
            changed = [n for n, digest in self._loaded.items() if now.get(n, digest) != digest]
            self._early = changed[0] if changed else None
        self._gradients.begin()
        self._strangers.begin(find_living())
        return self._generators.begin(seed)

    def begin_step(self) -> None:
        """A step of the loop begins."""
        self._gradients.begin_step()

    def stepped(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step."""
        self._gradients.stepped(optimizer)
        self._strangers.stepped(optimizer, self._steps)

    def end_step(self, save: bool) -> bool:
        """A step is done, which perhaps a `save` follows; whether the ranks are to `look` together.

        The same on all ranks.
        """
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
    """Of the first of its small tensors."""
    small: dict[str, int] = {}
    for name, tensor in model.state_dict().items():
        if len(small) >= _FEW:
            break
        if isinstance(tensor, Tensor) and not is_sharded(tensor) and tensor.numel() <= _SMALL:
            content = tensor.detach().reshape(-1).cpu().contiguous().view(torch.uint8)
            small[name] = xxh3_64(content.numpy().data).intdigest()
    return small
