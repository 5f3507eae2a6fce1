"""Sampling from a model."""

from __future__ import annotations

from itertools import islice
from typing import Any

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


def added(count: int, model: Transformer | None = None, **options: Any) -> list[int]:
    return list(islice(generate(model or build(), PROMPT, **options), count))


def test_temperature_zero_takes_the_likeliest_token_of_the_context() -> None:
    model, row = build(), PROMPT
    for _ in range(6):
        row = torch.cat((row, model(row[None, -4:])[0, -1].argmax(keepdim=True)))
    for temperature in (0.0, 1e-46):
        assert added(6, model, context=4, temperature=temperature) == row[3:].tolist()


def test_same_generator_same_text() -> None:
    first, second, other = (
        added(20, context=8, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2)
    )
    assert first == second
    assert first != other


def test_top_k_keeps_to_the_likeliest() -> None:
    model = build()
    likely = set(model(PROMPT[None])[0, -1].topk(2).indices.tolist())
    drawn = {added(1, model, context=8, temperature=50.0, top_k=2)[0] for _ in range(40)}
    assert drawn == likely


def test_top_p_keeps_to_the_fewest_that_have_it() -> None:
    model = build()
    probabilities = (model(PROMPT[None])[0, -1].detach() / 50.0).softmax(-1)
    three = probabilities.topk(3)
    for count in (1, 3):
        enough = float(three.values[:count].sum()) - 1e-4
        drawn = {added(1, model, context=8, temperature=50.0, top_p=enough)[0] for _ in range(60)}
        assert drawn == set(three.indices[:count].tolist())
    assert added(1, model, context=8, temperature=50.0, top_p=0.0) == [int(three.indices[0])]


def test_temperature_flattens() -> None:
    cold = {added(1, context=8, temperature=0.01)[0] for _ in range(10)}
    hot = {added(1, context=8, temperature=100.0)[0] for _ in range(40)}
    assert len(cold) == 1
    assert len(hot) > 5
