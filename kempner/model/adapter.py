"""Low-rank adaptation (LoRA, Hu et al., arXiv:2106.09685): weights that stay as they are, and
beside each a pair of small matrices that trains.

Names and shapes of the weights are those of the model without it. What does not train is no part of
the model's state dict: a checkpoint holds what trains, and names the one that has the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from kempner.model.spec.adapter import A, Adapter, B
from kempner.model.transformer import Transformer

Product = Callable[[Tensor, Tensor, Tensor], Tensor]
"""B A x, of x, A and B."""


def product(x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(F.linear(x, a), b)


class AdaptedLinear(nn.Linear):
    """W x + scale B A x, with dropout before A; [..., inputs] to [..., outputs].

    Attributes:
        product: computes B A x; another one where the matrices are spread over a tensor group.
        off: compute W x alone.
    """

    def __init__(self, plain: nn.Linear, adapter: Adapter) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = plain.in_features, plain.out_features
        self.weight = plain.weight
        self.register_parameter("bias", None)
        self.lora_A = nn.Parameter(plain.weight.new_empty(adapter.rank, plain.in_features))
        self.lora_B = nn.Parameter(plain.weight.new_empty(plain.out_features, adapter.rank))
        self.scale, self.dropout = adapter.scale, nn.Dropout(adapter.dropout)
        self.product: Product = product
        self.off = False

    def forward(self, input: Tensor) -> Tensor:
        if self.off:
            return F.linear(input, self.weight)
        x = self.dropout(input) if self.dropout.p else input
        added = self.product(x, self.lora_A, self.lora_B)
        return F.linear(input, self.weight) + added * self.scale


def adapt(model: Transformer, adapter: Adapter) -> None:
    """Give the layers that `adapter` names their pairs, of any content, and freeze all else.
    `model` is on the meta device, not sharded yet."""
    for block in model.blocks:
        block.draws |= adapter.dropout > 0
        for name in adapter.layers():
            around, _, attribute = name.rpartition(".")
            parent = block.get_submodule(around)
            setattr(parent, attribute, AdaptedLinear(getattr(parent, attribute), adapter))
    freeze(model)
    model.register_state_dict_post_hook(_leave_out_frozen)  # type: ignore[no-untyped-call]


def adapted_layers(model: nn.Module) -> dict[str, AdaptedLinear]:
    return {n: layer for n, layer in model.named_modules() if isinstance(layer, AdaptedLinear)}


@contextmanager
def without_adapter(model: nn.Module) -> Iterator[None]:
    """Have a model compute as the one that was imported does, and without dropout; in training its
    mode stays."""
    layers, training = adapted_layers(model).values(), model.training
    dropouts = [module for module in model.modules() if isinstance(module, nn.Dropout)]

    def switch(off: bool) -> None:
        for layer in layers:
            layer.off = off
        for dropout in dropouts:
            dropout.train(training and not off)

    switch(off=True)
    try:
        yield
    finally:
        switch(off=False)


def freeze(model: nn.Module) -> None:
    """Have nothing but the pairs train. To be called again where parameters were replaced."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith((A, B)))


def _leave_out_frozen(model: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
    for name, parameter in model.named_parameters(prefix.removesuffix(".")):
        if not parameter.requires_grad:
            state.pop(name, None)
