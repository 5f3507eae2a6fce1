"""AdamW whose step each rank makes on the shards that it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import AdamW
from torch.optim.adamw import adamw

from kempner.checkpoint.tensors.state import local_part
from kempner.training.compute.uncompiled import Uncompiled


class GuardedAdamW(Uncompiled, AdamW):
    """`torch.optim.AdamW` with its fused kernel, bit for bit; where `found_inf` is 1, a step
    changes nothing.

    Elements are updated one by one, so the kernel gets plain tensors: for DTensors torch would work
    out at the first step how each operation is to be sharded, which is half of a warm start.
    """

    found_inf: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """One step. Raises `ValueError` for a closure."""
        if closure is not None:
            raise ValueError("GuardedAdamW takes no closure")
        for group in self.param_groups:
            moved = [p for p in group["params"] if p.grad is not None]
            states = [self._state(parameter) for parameter in moved]
            beta1, beta2 = group["betas"]
            adamw(
                [local_part(parameter) for parameter in moved],
                [local_part(parameter.grad) for parameter in moved],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [],
                [state["step"] for state in states],
                fused=True,
                found_inf=self.found_inf,
                amsgrad=False,
                beta1=beta1,
                beta2=beta2,
                lr=group["lr"],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                maximize=False,
            )

    def _state(self, parameter: Tensor) -> dict[str, Any]:
        """The entries that `torch.optim.AdamW` keeps, under its names; zeros at first."""
        state: dict[str, Any] = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        return state
