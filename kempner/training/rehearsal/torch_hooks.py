"""What a program computes, as torch tells of it: batches, losses, rates and gradients.

The hooks are torch's global ones, so that nothing need be known of the program.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
)
from torch.optim import Optimizer
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from kempner.training.rehearsal.digest import of_rows, of_state, of_tensor, tensors_in


@dataclass
class Computed:
    """What was computed since the step began."""

    samples: list[str] = field(default_factory=list)
    """Digests of the samples that a model got in training, in their order."""
    losses: list[float] = field(default_factory=list)
    """What `backward` was called of."""
    rates: dict[str, list[float]] = field(default_factory=dict)
    gradients: dict[str, str] = field(default_factory=dict)
    evaluation: list[str] = field(default_factory=list)
    """Digests of what a model got and returned while it was evaluated."""
    torch_generator: str = ""
    """Where torch's generator stood as the model was called first."""
    batches: int = 0
    """How often a loss was computed."""


class TorchHooks:
    """Notes in `now` what is computed. `name_of` says what the program calls an object."""

    def __init__(self, name_of: Callable[[object], str]) -> None:
        self.now = Computed()
        self.optimizers: dict[int, Optimizer] = {}
        """Those that have stepped, by `id`."""
        self.on_optimizer: Callable[[], None] = lambda: None
        self._name_of, self._depth = name_of, 0

    def install(self) -> None:
        """Have torch call this, until the process ends."""
        register_module_forward_pre_hook(self._enter)
        register_module_forward_hook(self._leave, with_kwargs=True, always_call=True)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        backward = torch.autograd.backward

        def noting(tensors: Any, *arguments: Any, **options: Any) -> None:
            self._note_losses(tensors)
            backward(tensors, *arguments, **options)

        torch.autograd.backward = noting

    def weights(self) -> dict[str, str]:
        """A digest of what each optimizer trains, by the optimizer's name."""
        return {
            self._name_of(optimizer): of_state(
                [p for g in optimizer.param_groups for p in g["params"]]
            )
            for optimizer in self.optimizers.values()
        }

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        self._depth += 1
        if self._depth == 1 and not self.now.torch_generator:
            self.now.torch_generator = of_tensor(torch.default_generator.get_state())

    def _leave(self, module: nn.Module, arguments: Any, options: Any, result: Any) -> None:
        self._depth -= 1
        if self._depth > 0 or torch.compiler.is_compiling():
            return
        given = tensors_in([arguments, options])
        if not torch.is_grad_enabled():
            returned = tensors_in(result if not hasattr(result, "to_tuple") else result.to_tuple())
            self.now.evaluation.append(of_state([given, returned]))
            return
        for tensor in given:
            if tensor.grad_fn is None and not tensor.requires_grad:
                self.now.samples += of_rows(tensor)

    def _note_losses(self, tensors: Any) -> None:
        self.now.batches += 1
        for tensor in tensors_in([tensors]):
            if tensor.numel() == 1:
                self.now.losses.append(float(tensor.detach()))

    def _before_step(self, optimizer: Optimizer, *_: Any) -> None:
        self.optimizers[id(optimizer)] = optimizer
        name = self._name_of(optimizer)
        rates = [float(group.get("lr", 0.0)) for group in optimizer.param_groups]
        self.now.rates[name] = rates

    def _after_step(self, optimizer: Optimizer, *_: Any) -> None:
        # Not before it: a closure computes the gradients within the step.
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        gradients = [p.grad if isinstance(p.grad, Tensor) else None for p in parameters]
        self.now.gradients[self._name_of(optimizer)] = of_state(gradients)
        self.on_optimizer()
