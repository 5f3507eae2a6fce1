"""Flips single bits of a rank, in memory or while it computes: real faults for rehearsals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from kempner.checkpoint.tensors.state import INTEGERS, local_part


def flip(tensor: Tensor, bit: int, element: int = 0) -> None:
    """Flip a bit of an element of a plain tensor, counted around; nothing of an empty one."""
    if tensor.numel():
        _bits(tensor, element).bitwise_xor_(_mask(tensor, bit))


def _bits(tensor: Tensor, element: int) -> Tensor:
    flat = tensor.detach().view(-1).view(INTEGERS[tensor.element_size()])
    return flat[element % tensor.numel()]


def _mask(tensor: Tensor, bit: int) -> int:
    width = 8 * tensor.element_size()
    mask = 1 << (bit % width)
    return mask - (1 << width) if mask >> (width - 1) else mask


@dataclass
class BitFlip:
    """One bit that flips: of `weights` or `moments` in memory, or of `inputs`, of `activations` of
    the first block, or of their `gradients` while they are computed; once, or `sticking` from then
    on, in which case bits in memory keep their new value."""

    where: str
    bit: int
    sticking: bool = False
    element: int = 0
    handles: list[RemovableHandle] = field(default_factory=list)
    stuck: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def plant(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Flip it now, or in the next computation. One that sticks is planted in every step."""
        match self.where:
            case "weights":
                self._flip_memory([p for p in model.parameters() if p.requires_grad])
            case "moments":
                states = (s for state in optimizer.state.values() for s in state.values())
                self._flip_memory([s for s in states if isinstance(s, Tensor) and s.ndim])
            case _ if not self.handles:
                self._hook(model)

    def remove(self) -> None:
        """End one that sticks."""
        for handle in self.handles:
            handle.remove()
        self.handles, self.stuck = [], []

    def _flip_memory(self, tensors: Sequence[Tensor]) -> None:
        parts = [part for part in map(local_part, tensors) if part.numel()]
        if self.stuck:
            for place, value in self.stuck:
                place.copy_(value)
        elif parts:
            part = parts[self.element % len(parts)]
            flip(part, self.bit, self.element)
            place = _bits(part, self.element)
            self.stuck = [(place, place.clone())] if self.sticking else []

    def _hook(self, model: nn.Module) -> None:
        block = next(iter(getattr(model, "layers", [model])))
        if self.where == "inputs":
            handle = model.register_forward_pre_hook(self._of_inputs)
        else:
            handle = block.register_forward_hook(
                self._of_gradients if self.where == "gradients" else self._of_activations
            )
        self.handles.append(handle)

    def _happened(self) -> None:
        if not self.sticking:
            self.remove()

    def _of_inputs(self, _: nn.Module, given: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens, *others = given
        tokens = tokens.clone()
        place = tokens.view(-1)[self.element % tokens.numel()]
        # The lowest bit that is set, so that it stays a token.
        place.copy_(torch.where(place > 0, place & (place - 1), 1))
        self._happened()
        return (tokens, *others)

    def _of_activations(self, _module: nn.Module, _given: object, returned: Tensor) -> None:
        flip(returned, self.bit, self.element)
        self._happened()

    def _of_gradients(self, _module: nn.Module, _given: object, returned: Tensor) -> None:
        returned.register_hook(self._flipped)  # type: ignore[no-untyped-call]
        self._happened()

    def _flipped(self, gradient: Tensor) -> Tensor:
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        flip(gradient, self.bit, self.element)
        return gradient
