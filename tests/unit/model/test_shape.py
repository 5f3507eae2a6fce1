"""Sizes computed from the configuration equal those of the built model."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kempner.config.loading import load
from kempner.config.model import PRESETS, ModelSection
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
        ModelSection(dim=48, n_layers=2, n_heads=4, n_kv_heads=1, qk_norm=True),
        ModelSection(dim=48, n_layers=2, n_heads=4, vocab_multiple=37, tie_embeddings=True),
        LLAMA_7B,
    ],
)
def test_count_equals_the_built_model(section: ModelSection) -> None:
    with torch.device("meta"):
        model = Transformer(Shape.of(section, 32000))
    built = sum(parameter.numel() for parameter in model.parameters())
    assert count_parameters(section, 32000) == built


PUBLISHED = {
    "debug": 19_794_176,
    "llama2-7b": 6_738_415_616,
    "llama2-13b": 13_015_864_320,
    "llama2-70b": 68_976_648_192,
    "llama3-8b": 8_030_261_248,
    "llama3-70b": 70_553_706_496,
    "llama3.1-8b": 8_030_261_248,
    "llama3.1-70b": 70_553_706_496,
    "llama3.2-1b": 1_235_814_400,
    "llama3.3-70b": 70_553_706_496,
    "qwen3-32b": 32_762_123_264,
}


@pytest.mark.parametrize("name", PRESETS)
def test_a_named_model_has_its_published_size(name: str) -> None:
    section = ModelSection.model_validate({"preset": name})
    assert section.vocab_size is not None
    with torch.device("meta"):
        model = Transformer(Shape.of(section, section.vocab_size))
    assert sum(parameter.numel() for parameter in model.parameters()) == PUBLISHED[name]
    assert count_parameters(section, section.vocab_size) == PUBLISHED[name]


@pytest.mark.parametrize(
    ("file", "preset"),
    [
        ("1b", "llama3.2-1b"),
        ("7b", "llama2-7b"),
        ("8b", "llama3.1-8b"),
        ("13b", "llama2-13b"),
        ("32b", "qwen3-32b"),
        ("70b", "llama3-70b"),
        ("32b-sft", "qwen3-32b"),
        ("70b-sft", "llama3.3-70b"),
    ],
)
def test_a_ready_configuration_has_the_sizes_of_its_model(file: str, preset: str) -> None:
    model = load(Path(__file__).parents[3] / f"configs/train/{file}.toml").model
    named = ModelSection.model_validate({"preset": preset})
    found, expected = (Shape.of(section, section.vocab_size or 0) for section in (model, named))
    assert found.fixed() == expected.fixed()


def test_a_key_that_is_given_overrides_the_preset() -> None:
    given = {"preset": "llama3.1-8b", "n_layers": 2, "rope_scaling": {"factor": 4}}
    section = ModelSection.model_validate(given)
    assert (section.n_layers, section.dim, section.n_kv_heads) == (2, 4096, 8)
    assert section.rope_scaling.factor == 4
    assert section.rope_scaling.original_max_position_embeddings == 8192
    assert section.preset is None  # so that what is kept does not depend on the list
    assert ModelSection.model_validate(section.model_dump(exclude_none=True)) == section
    unscaled = ModelSection.model_validate({**given, "rope_scaling": {"factor": 1}})
    assert Shape.of(unscaled, 9).rope_scaling is None


def test_the_record_of_a_model_is_as_it_was_before_later_fields() -> None:
    """So that checkpoints of before load, and any change of the model shows."""
    old = Shape.of(ModelSection(dim=48, n_heads=4), 257)
    assert not {"vocab_multiple", "rope_scaling", "qk_norm"} & old.fixed().keys()
    assert Shape.recorded(old.fixed(), 4096) == old
    given = {"vocab_multiple": 8, "qk_norm": True, "rope_scaling": {"factor": 8}}
    new = Shape.of(ModelSection.model_validate({"dim": 48, **given}), 257)
    assert given.keys() <= new.fixed().keys()
    assert Shape.recorded(json.loads(json.dumps(new.fixed())), 4096) == new


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
