"""Gradients that a loop does not use in the step that has computed them.

They are held where an optimizer has not stepped since, as in an accumulation over several steps of
the loop, and where they are found not to be zeroed before the next backward pass.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kempner.checkpoint.registered.groups import ParameterNames
from kempner.checkpoint.registered.objects import Held
from kempner.checkpoint.tensors.state import is_sharded, local_part
from kempner.run.process.exit_codes import MismatchError

NAME = "kept.gradients"
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
