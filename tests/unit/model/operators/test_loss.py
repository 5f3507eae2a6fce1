"""The loss in chunks is the loss of all logits, and no tensor holds them all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.serve.loader import IGNORE as IGNORE_OF_LOADER
from kempner.data.serve.loader import MicroBatch
from kempner.model import fused as loss
from kempner.model.fused import IGNORE, linear_cross_entropy
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer
from kempner.training.compute.forward_backward import summed_loss

CPU = torch.device("cpu")
VOCAB, ROWS, LENGTH = 61, 3, 20
TOLERANCE = 3e-6
"""Largest difference, relative to the largest element: a few float32 roundings."""
Gradients = dict[str, Tensor]


class Rows(TorchDispatchMode):
    """The most rows of logits that one tensor had."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and is_logits(tensor):
                self.most = max(self.most, tensor.numel() // tensor.shape[-1])
        return out


def is_logits(tensor: Tensor) -> bool:
    """Whether its rows are as long as the vocabulary; the weight is, transposed, but a view."""
    return tensor.ndim > 1 and tensor.shape[-1] >= VOCAB and tensor.is_contiguous()


def build(chunk: int, dtype: str = "float32", tied: bool = False) -> Transformer:
    model = ModelSection(
        dim=24, n_layers=1, n_heads=4, ffn_dim=40, vocab_multiple=8, tie_embeddings=tied
    )
    train = TrainSection.model_validate({"seq_len": LENGTH, "loss_chunk": chunk, "dtype": dtype})
    return build_model(Config(model=model, train=train), VOCAB, CPU, None)


def micro_batch() -> MicroBatch:
    tokens = torch.randint(0, VOCAB, (ROWS, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    targets = tokens[:, 1:].clone()
    targets[0, 5:9] = IGNORE
    targets[2] = IGNORE
    return MicroBatch(tokens[:, :-1], targets)


def gradients(model: Transformer) -> tuple[Tensor, Gradients]:
    """The summed loss, and the gradients of 3/7 of it."""
    total = summed_loss(model, micro_batch(), CPU)
    torch.autograd.backward(total * 3 / 7)
    return total.detach(), {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_loss_and_gradients_are_those_of_all_logits(chunk: int, tied: bool) -> None:
    total, expected = gradients(build(0, tied=tied))
    with Rows() as rows:
        in_chunks, found = gradients(build(chunk, tied=tied))
    assert rows.most == min(chunk, ROWS * LENGTH)
    torch.testing.assert_close(in_chunks, total, rtol=1e-6, atol=0)
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        largest = gradient.abs().max().item()
        assert (found[name] - gradient).abs().max().item() <= TOLERANCE * largest, name
    table = found["embed.weight" if tied else "output.weight"]
    assert table.shape[0] == 64
    assert table[VOCAB:].abs().max() == 0


def test_bfloat16_multiplies_so_and_sums_in_float32() -> None:
    exact, _ = gradients(build(0))
    whole, expected = gradients(build(0, "bfloat16"))
    total, found = gradients(build(7, "bfloat16"))
    assert total.dtype is torch.float32
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)  # the same rounded logits
    assert total != exact
    for name, gradient in expected.items():
        assert found[name].dtype is torch.float32
        off = (found[name] - gradient).norm() / gradient.norm()
        assert off < 0.01, name  # a rounding to bfloat16 is 0.004


def test_evaluation_computes_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    total, _ = gradients(build(7))
    asked = []
    chunks = loss._chunks
    monkeypatch.setattr(
        loss,
        "_chunks",
        lambda *args, gradients: [asked.append(gradients), chunks(*args, gradients)][1],
    )
    with torch.no_grad():
        assert torch.equal(summed_loss(build(7), micro_batch(), CPU), total)
    assert asked == [False]


def test_tokens_without_a_target_weigh_nothing() -> None:
    assert IGNORE == IGNORE_OF_LOADER
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    total = linear_cross_entropy(hidden, weight, torch.full((5,), IGNORE), vocab_size=9, chunk=2)
    torch.autograd.backward(total)
    assert total == 0
    assert hidden.grad is not None
    assert weight.grad is not None
    assert hidden.grad.abs().max() == weight.grad.abs().max() == 0
