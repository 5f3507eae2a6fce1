"""SGD whose step the device can skip, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD
from torch.optim.sgd import sgd

from kempner.checkpoint.tensors.state import local_part
from kempner.training.compute.uncompiled import Uncompiled


class GuardedSGD(Uncompiled, SGD):
    """`torch.optim.SGD` with its fused kernel; where `found_inf` is 1, a step changes nothing.

    Elements are updated one by one, so each rank updates the shards that it has: the kernel itself
    does not take DTensors.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. Raises `ValueError` for a closure."""
        if closure is not None:
            raise ValueError("GuardedSGD takes no closure")
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            sgd(
                [local_part(parameter) for parameter in moved],
                [local_part(parameter.grad) for parameter in moved],
                [self._momentum(parameter, group) for parameter in moved],
                fused=True,
                found_inf=self.found_inf,
                weight_decay=group["weight_decay"],
                momentum=group["momentum"],
                lr=group["lr"],
                dampening=group["dampening"],
                nesterov=group["nesterov"],
                maximize=group["maximize"],
            )

    def _momentum(self, parameter: Tensor, group: Mapping[str, Any]) -> Tensor | None:
        """This rank's part of the momentum, None without one.

        It begins as zeros: the kernel would take uninitialised memory for it after a first step
        that was called off.
        """
        if group["momentum"] == 0:
            return None
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return local_part(state["momentum_buffer"])
