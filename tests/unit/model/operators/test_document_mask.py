"""Documents in one sequence are computed as if each were alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.fused import IGNORE
from kempner.model.sharding import build_model
from kempner.model.transformer import (
    Transformer,
    attend,
    block_mask,
    document_mask,
    document_numbers,
)

END, VOCAB, LENGTH = 7, 29, 24
TOLERANCE = 3e-6
"""Largest difference, relative to the largest element: a few float32 roundings."""


def build(**train: object) -> Transformer:
    sizes = ModelSection(dim=24, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40)
    options = TrainSection.model_validate({"seq_len": LENGTH, **train})
    model = build_model(Config(model=sizes, train=options), VOCAB, torch.device("cpu"), None)
    model.document_end = END
    return model


def packed() -> Tensor:
    """Documents of several lengths, some cut off, an empty one, and a row without an end."""
    draw = torch.Generator().manual_seed(2)
    tokens = torch.randint(8, VOCAB, (3, LENGTH), generator=draw)
    tokens[0, [0, 5, 6, 17]] = END
    tokens[1, [3, LENGTH - 1]] = END
    return tokens


def documents(row: Tensor) -> list[Tensor]:
    cuts = (row == END).nonzero().flatten() + 1
    return [part for part in row.tensor_split(cuts.tolist()) if len(part)]


@pytest.mark.parametrize(
    "train", [{}, {"activation_checkpointing": "full"}, {"activation_checkpointing": "selective"}]
)
def test_packed_documents_equal_separate_ones(train: dict[str, object]) -> None:
    """Logits and gradients, though a document alone begins at position 0."""
    together, alone = build(**train), build()
    alone.document_end = None
    tokens = packed()
    logits = together(tokens)
    apart = [torch.cat([alone(d[None])[0] for d in documents(row)]) for row in tokens]
    close(logits, torch.stack(apart))
    targets = tokens.roll(-1, 1)
    targets[:, -1] = IGNORE
    torch.autograd.backward(together(tokens, targets))
    for row, wanted in zip(tokens, targets, strict=True):
        first = 0
        for document in documents(row):
            last = first + len(document)
            torch.autograd.backward(alone(document[None], wanted[None, first:last]))
            first = last
    for one, other in zip(together.parameters(), alone.parameters(), strict=True):
        assert one.grad is not None
        assert other.grad is not None
        close(one.grad, other.grad)


def close(found: Tensor, expected: Tensor) -> None:
    assert (found - expected).abs().max() <= TOLERANCE * expected.abs().max()


def test_without_the_mask_they_see_each_other() -> None:
    model = build()
    masked = model(packed())
    model.document_end = None
    plain = model(packed())
    assert not torch.equal(masked[0], plain[0])
    close(masked[2], plain[2])


@pytest.mark.filterwarnings("ignore:flex_attention called without:UserWarning")
def test_blocks_of_the_mask_say_the_same() -> None:
    """FlexAttention's, whose backward needs CUDA."""
    draw = torch.Generator().manual_seed(3)
    q = torch.randn(3, 4, LENGTH, 8, generator=draw)
    k, v = torch.randn(2, 3, 2, LENGTH, 8, generator=draw)
    numbers = document_numbers(packed(), END)
    pairs = document_mask(numbers)
    with torch.no_grad():
        by_blocks = attend(q, k, v, block_mask(numbers), grouped=True)
    close(by_blocks, attend(q, k, v, pairs, grouped=True))
