"""Sampling from a model."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch import Tensor

from kempner.config.model import RopeScalingSection
from kempner.config.sections import Config, ModelSection
from kempner.model.sharding import build_model
from kempner.model.transformer import KVCache, Transformer, _draw, generate

PROMPT = torch.tensor([3, 1, 4])


def build(**sizes: Any) -> Transformer:
    section = ModelSection(**{"dim": 16, "n_layers": 1, "n_heads": 2, "ffn_dim": 32, **sizes})
    model = build_model(Config(model=section), 29, torch.device("cpu"), None)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(20.0)  # confident, so that the likeliest token is not a tie
    return model


def added(count: int, model: Transformer | None = None, **options: Any) -> list[int]:
    return list(islice(generate(model or build(), PROMPT, **options), count))


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped heads": {"n_heads": 4, "n_kv_heads": 2},
    "one head of keys": {"n_heads": 4, "n_kv_heads": 1, "tie_embeddings": True},
    "normed heads": {"qk_norm": True, "head_dim": 12},
    "stretched positions": {
        "rope_scaling": RopeScalingSection(factor=4.0, original_max_position_embeddings=8)
    },
    "documents": {"n_kv_heads": 1},
}


def afresh(
    model: Transformer, prompt: Tensor, count: int, context: int, temperature: float, seed: int
) -> list[int]:
    """What `generate` adds, with everything in the window computed again for each token."""
    window, generator, made = prompt[-context:], torch.Generator().manual_seed(seed), []
    for _ in range(count):
        drawn = _draw(model(window[None])[0, -1].detach(), temperature, None, 1.0, generator)
        made.append(int(drawn))
        window = torch.cat((window, drawn))
        if len(window) > context:
            window = window[context // 4 :]
    return made


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("length", [1, 5, 12, 20])
def test_the_cache_changes_no_token(variant: str, length: int) -> None:
    model = build(n_layers=3, **VARIANTS[variant])
    if variant == "documents":
        model.document_end = 4
    prompt = torch.randint(29, (length,), generator=torch.Generator().manual_seed(length))
    prompt[length // 2] = 4  # the prompt has the end of a document in it
    for temperature, seed in ((0.0, 0), (1.0, 1), (5.0, 2)):
        generator = torch.Generator().manual_seed(seed)
        made = generate(model, prompt, context=12, temperature=temperature, generator=generator)
        # Three times the window: what was forgotten in between is forgotten in both.
        assert list(islice(made, 36)) == afresh(model, prompt, 36, 12, temperature, seed)


def test_a_token_costs_the_forward_of_one() -> None:
    model, read = build(), []
    model.layers[0].register_forward_pre_hook(lambda _, inputs: read.append(inputs[0].shape[1]))
    added(12, model, context=12)
    # The prompt of three, nine tokens, and then the window again, without its oldest quarter.
    assert read == [3, *[1] * 9, 10, 1]


def test_a_full_cache_takes_one_token_at_a_time() -> None:
    model = build()
    cache = [KVCache(8)]
    model(PROMPT[None], cache=cache)
    with pytest.raises(ValueError, match="2 tokens at once for a cache of 3"):
        model(torch.tensor([[3, 1, 4, 1, 5]]), cache=cache)


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
