"""Sizes computed from the configuration equal those of the built model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kempner.config.loading import load
from kempner.config.sections import ModelSection
from kempner.model.spec.shape import Shape, count_parameters, default_ffn_dim, flops_per_token
from kempner.model.transformer import Transformer

LLAMA_7B = ModelSection(dim=4096, n_layers=32, n_heads=32, ffn_dim=11008)


@pytest.mark.parametrize(
    "section",
    [
        ModelSection(dim=48, n_layers=1, n_heads=4),
        ModelSection(dim=48, n_layers=3, n_heads=6, n_kv_heads=2, ffn_dim=100),
        ModelSection(dim=50, n_layers=2, n_heads=3, head_dim=8, n_kv_heads=1),
        ModelSection(dim=48, n_layers=2, n_heads=4, tie_embeddings=True),
        LLAMA_7B,
    ],
)
def test_count_equals_the_built_model(section: ModelSection) -> None:
    with torch.device("meta"):
        model = Transformer(Shape.of(section, 32000))
    built = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(section, 32000) == built


def test_llama_7b_has_its_published_size() -> None:
    assert count_parameters(LLAMA_7B, 32000) == 6_738_415_616


def test_the_demo_has_about_a_million_parameters() -> None:
    model = load(Path(__file__).parents[3] / "configs/train/debug.toml").model
    assert model.vocab_size == 257
    assert 0.9e6 < count_parameters(model, 257) < 1.2e6


@pytest.mark.parametrize(("dim", "ffn_dim"), [(96, 256), (97, 512), (288, 768), (4096, 11008)])
def test_default_ffn_is_eight_thirds_rounded_up(dim: int, ffn_dim: int) -> None:
    assert default_ffn_dim(dim) == ffn_dim


def test_flops_count_what_multiplies() -> None:
    section = ModelSection(dim=8, n_layers=2, n_heads=2, n_kv_heads=1, ffn_dim=16)
    shape = Shape.of(section, vocab_size=10)
    block = 8 * 8 * 2 + 8 * 4 * 2 + 3 * 8 * 16 + 2 * 8
    by_hand = 6 * (2 * block + 8 + 80) + 12 * 2 * 2 * 4 * 32
    assert flops_per_token(shape, seq_len=32) == by_hand


def test_tying_saves_parameters_but_no_flops() -> None:
    shape = Shape.of(ModelSection(dim=8, n_layers=2, n_heads=2), vocab_size=10)
    tied = replace(shape, tie_embeddings=True)
    assert tied.parameters == shape.parameters - 80
    assert flops_per_token(tied, 32) == flops_per_token(shape, 32)
