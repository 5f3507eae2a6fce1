"""Sampling from a model."""

from __future__ import annotations

import torch

from kempner.config.sections import Config, ModelSection
from kempner.model.generate import generate
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer

PROMPT = torch.tensor([3, 1, 4])


def build() -> Transformer:
    section = ModelSection(dim=16, n_layers=1, n_heads=2, ffn_dim=32)
    model = build_model(Config(model=section), 29, torch.device("cpu"), None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)  # confident, so that the likeliest token is not a tie
    return model


def test_temperature_zero_takes_the_likeliest_token_of_the_context() -> None:
    model, row = build(), PROMPT
    for _ in range(6):
        row = torch.cat((row, model(row[None, -4:])[0, -1].argmax(keepdim=True)))
    assert torch.equal(generate(model, PROMPT, new_tokens=6, context=4, temperature=0), row)


def test_same_generator_same_text() -> None:
    first, second, other = (
        generate(
            build(), PROMPT, new_tokens=20, context=8, generator=torch.Generator().manual_seed(seed)
        )
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(first[:3], PROMPT)
    assert len(first) == 23


def test_top_k_keeps_to_the_likeliest() -> None:
    model = build()
    likely = set(model(PROMPT[None])[0, -1].topk(2).indices.tolist())
    drawn = {
        int(generate(model, PROMPT, new_tokens=1, context=8, temperature=50.0, top_k=2)[-1])
        for _ in range(40)
    }
    assert drawn == likely


def test_temperature_flattens() -> None:
    cold = {
        int(generate(build(), PROMPT, new_tokens=1, context=8, temperature=0.01)[-1])
        for _ in range(10)
    }
    hot = {
        int(generate(build(), PROMPT, new_tokens=1, context=8, temperature=100.0)[-1])
        for _ in range(40)
    }
    assert len(cold) == 1
    assert len(hot) > 5
