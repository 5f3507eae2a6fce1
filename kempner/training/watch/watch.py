"""Notices what a loop changes and no checkpoint would hold.

    watch = Watch(everything, given)
    everything = watch.held_with(everything)
    watch.restored()                       # the newest checkpoint is loaded
    watch.begin(seed)                      # the loop begins
    watch.begin_step(); watch.stepped(optimizer); watch.end_step()

What it finds is a `UsageError` of the next look at the state: after the first step, by the first
save, or with a later save. Each step costs it a few comparisons.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from xxhash import xxh3_64

from kempner.checkpoint.registered.composite import plainly_named
from kempner.checkpoint.registered.everything import Everything
from kempner.checkpoint.registered.groups import ParameterNames
from kempner.checkpoint.tensors.state import is_sharded
from kempner.run.process.exit_codes import UsageError
from kempner.training.watch import generators, gradients
from kempner.training.watch.living import find_living
from kempner.training.watch.strangers import Given, Strangers

LOOKS = 3
"""Steps from the start of a loop, at least, after which it is looked at what they have done."""

_SMALL, _FEW = 1 << 16, 64
"""Elements of the tensors, and how many of them, that must stay as they were loaded."""


class Watch:
    """Of one loop, on every rank."""

    def __init__(self, everything: Everything, given: Given) -> None:
        self._given, self._model = given, plainly_named(everything.model)
        self._generators = generators.GlobalGenerators()
        names = ParameterNames(self._model)
        self._gradients = gradients.KeptGradients(given.optimizers, names)
        self._strangers = Strangers(given)
        self._loaded: dict[str, int] = {}
        self._early: str | None = None
        self._steps, self._saved, self._looking = 0, False, True

    def held_with(self, everything: Everything) -> Everything:
        """With what is held without being registered."""
        own = {
            generators.NAME: self._generators.held(),
            gradients.NAME: self._gradients.held(),
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
