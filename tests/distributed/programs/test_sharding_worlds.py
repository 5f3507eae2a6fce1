"""Sharded over real processes, weights are the same and gradients are sums."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import drills, launch
from sharded_gradients import ASKED, CPU, VOCAB, Results, backward, batch

from kempner.config.sections import Config
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer

TOLERANCE = 3e-6
"""Largest difference of a gradient, relative to its largest element: a few float32 roundings."""


@pytest.fixture(scope="module", params=[3, *drills(2)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Results:
    """What a world of processes made of every configuration."""
    out = tmp_path_factory.mktemp("world") / "rank0.pt"
    launch(Path(__file__).with_name("sharded_gradients.py"), request.param, out)
    results: Results = torch.load(out)
    return results


def alone(config: Config) -> Transformer:
    """The model of a single process, with the gradient of the whole batch and of all logits."""
    model = build_model(config, VOCAB, CPU, None)
    model.loss_chunk = 0
    backward(model, batch())
    return model


@pytest.mark.parametrize(
    "name", ["grouped", "summed every time", "tied", "qwen", "full", "selective"]
)
def test_gradients_are_the_sum_over_ranks(ranks: Results, name: str) -> None:
    weights, gradients = ranks[name]
    model = alone(ASKED[name])
    assert weights.keys() == gradients.keys() == dict(model.named_parameters()).keys()
    for key, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(weights[key], parameter), key
        scale = parameter.grad.abs().max().item()
        difference = (gradients[key] - parameter.grad).abs().max().item()
        assert difference <= TOLERANCE * scale, key


@pytest.mark.parametrize(("name", "kept"), [("full", "grouped"), ("selective", "tied")])
def test_blocks_that_compute_again_change_no_bit(ranks: Results, name: str, kept: str) -> None:
    gradients, expected = ranks[name][1], ranks[kept][1]
    assert all(torch.equal(gradients[key], expected[key]) for key in expected)


def test_bfloat16_ranks_keep_float32_weights_and_sums(ranks: Results) -> None:
    weights, gradients = ranks["bfloat16"]
    exact = alone(ASKED["grouped"])
    for key, parameter in exact.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(weights[key], parameter), key
        difference = (gradients[key] - parameter.grad).norm() / parameter.grad.norm()
        assert 0 < difference.item() < 0.05, key
