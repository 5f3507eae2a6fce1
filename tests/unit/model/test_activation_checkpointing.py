"""Blocks that compute again: the same gradients to the bit, and fewer tensors kept for them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.sharding import build_model
from kempner.model.spec.memory import (
    Checkpointing,
    activation_bytes_per_token,
    block_bytes_per_token,
    checkpointed_bytes_per_token,
)
from kempner.model.transformer import Transformer

CPU = torch.device("cpu")
LAYERS, BATCH, LENGTH = 3, 2, 16
TOKENS = torch.arange(BATCH * LENGTH).view(BATCH, LENGTH)


class Products(TorchDispatchMode):
    """Counts matrix products and attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.matrices = self.attentions = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.matrices += func is torch.ops.aten.mm.default
        name = "_scaled_dot_product_flash_attention_for_cpu.default"
        self.attentions += func.name().endswith(name) or str(func).endswith(name)
        return func(*args, **(kwargs or {}))


class Storages(TorchDispatchMode):
    """All memory that results were in."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in args if isinstance(t, Tensor)}
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage()._cdata not in given:
                storage = tensor.untyped_storage()
                self.seen[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        return out


def build(dropout: float = 0.3, **train: object) -> Transformer:
    model = ModelSection(
        dim=32, n_layers=LAYERS, n_heads=4, n_kv_heads=2, ffn_dim=48, dropout=dropout
    )
    options = TrainSection.model_validate({"seq_len": LENGTH, **train})
    return build_model(Config(model=model, train=options), 61, CPU, None)


def step(model: Transformer) -> tuple[list[Tensor], Products]:
    """Loss and gradients, with dropout of one seed, and what it took."""
    torch.manual_seed(3)
    with Products() as products:
        loss = model(TOKENS, TOKENS)
        torch.rand(5)  # other draws in the meantime change nothing
        torch.autograd.backward(loss)
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return [loss.detach(), *gradients], products


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", ["full", "selective"])
def test_gradients_are_the_same_bits(mode: str, every: int) -> None:
    plain = build()
    expected, once = step(plain)
    model = build(activation_checkpointing=mode, activation_checkpointing_every=every)
    assert list(model.state_dict()) == list(plain.state_dict())
    found, again = step(model)
    assert len(found) == len(expected) == 1 + 9 * LAYERS + 3
    assert all(map(torch.equal, found, expected))
    blocks = -(-LAYERS // every)
    if mode == "full":
        assert again.matrices == once.matrices + blocks * 7
        assert again.attentions == once.attentions + blocks
    else:
        assert (again.matrices, again.attentions) == (once.matrices, once.attentions)


@pytest.mark.parametrize("every", [1, 2])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
def test_what_is_kept_is_counted_to_the_byte(mode: Checkpointing, every: int) -> None:
    given = {} if mode == "none" else {"activation_checkpointing_every": every}
    model = build(dropout=0.0, activation_checkpointing=mode, **given)
    block = block_bytes_per_token(model.shape, 4)
    kept = block if mode == "none" else checkpointed_bytes_per_token(model.shape, 4, mode)
    expected = activation_bytes_per_token(model.shape, 4, mode, every) - (block - kept)
    assert kept_bytes(model) == BATCH * LENGTH * expected


def kept_bytes(model: Transformer) -> int:
    """Bytes that a forward leaves behind, besides the logits."""
    with Storages() as storages:
        tokens = TOKENS.clone()
        logits = model(tokens)
    own = logits.untyped_storage()._cdata
    return sum(
        nbytes
        for place, (ref, nbytes) in storages.seen.items()
        if place != own and not ref.expired()
    )


def test_evaluation_computes_once() -> None:
    model = build(activation_checkpointing="full")
    with torch.no_grad(), Products() as products:
        model(TOKENS, TOKENS)
    assert products.attentions == LAYERS
