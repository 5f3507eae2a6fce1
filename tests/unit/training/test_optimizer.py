"""Which parameters get which treatment, and what every optimizer keeps."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.optim import SGD, AdamW, Muon, Optimizer

from kempner.checkpoint.tensors.state import capture
from kempner.config.sections import Config, ModelSection, OptimizerSection
from kempner.model.sharding import build_model
from kempner.model.spec.memory import moment_elements
from kempner.model.transformer import Transformer
from kempner.training.compute.optimizer import MuonAndAdamW, build_optimizer, update

SECTIONS = [
    OptimizerSection(),
    OptimizerSection(name="muon"),
    OptimizerSection(name="sgd"),
    OptimizerSection(name="sgd", momentum=0.0),
]

FINITE = torch.tensor(1.5)


def model_of(**sizes: Any) -> Transformer:
    section = ModelSection(dim=16, n_layers=2, n_heads=2, ffn_dim=24, **sizes)
    return build_model(Config(model=section), 31, torch.device("cpu"), None)


def names(model: nn.Module, group: dict[str, Any]) -> set[str]:
    by_id = {id(parameter): name for name, parameter in model.named_parameters()}
    return {by_id[id(parameter)] for parameter in group["params"]}


def backward(model: Transformer) -> None:
    model(torch.arange(20).view(2, 10)).square().sum().backward()


@pytest.mark.parametrize("tied", [False, True])
def test_muon_has_the_matrices_of_the_blocks_and_adamw_the_rest(tied: bool) -> None:
    model = model_of(tie_embeddings=tied)
    optimizer = build_optimizer(model, OptimizerSection(name="muon", weight_decay=0.3))
    muon, matrices, norms = optimizer.param_groups
    everything = {name for name, _ in model.named_parameters()}
    hidden = {name for name in everything if "attention.w" in name or "ffn.w" in name}
    assert len(hidden) == 14
    assert names(model, muon) == hidden
    assert names(model, matrices) == {"embed.weight"} | (set() if tied else {"output.weight"})
    assert names(model, norms) == {name for name in everything if name.endswith("norm.weight")}
    assert [group["weight_decay"] for group in (muon, matrices, norms)] == [0.3, 0.3, 0.0]


@pytest.mark.parametrize("section", SECTIONS[:3], ids=lambda section: section.name)
def test_the_schedule_moves_every_group(section: OptimizerSection) -> None:
    model = model_of()
    optimizer = build_optimizer(model, section)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model)
    update(model, optimizer, FINITE, rate=0.0, max_norm=1.0)
    assert all(map(torch.equal, model.parameters(), before))
    backward(model)
    update(model, optimizer, FINITE, rate=1e-2, max_norm=1.0)
    assert not any(map(torch.equal, model.parameters(), before))
    assert all(parameter.grad is None for parameter in model.parameters())


def test_two_optimizers_as_one_do_what_they_do_alone() -> None:
    together, apart = model_of(), model_of()
    optimizer = build_optimizer(together, OptimizerSection(name="muon", lr=0.01))
    hidden = [p for n, p in apart.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    rest = [p for p in apart.parameters() if all(p is not matrix for matrix in hidden)]
    alone = [
        Muon(hidden, lr=0.01, momentum=0.95, adjust_lr_fn="match_rms_adamw"),
        AdamW(
            [
                {"params": [p for p in rest if p.ndim == 2], "weight_decay": 0.1},
                {"params": [p for p in rest if p.ndim == 1], "weight_decay": 0.0},
            ],
            lr=0.01,
            betas=(0.9, 0.95),
            fused=True,
        ),
    ]
    for _ in range(3):
        backward(together)
        update(together, optimizer, FINITE, rate=0.01, max_norm=0.0)
        backward(apart)
        for part in alone:
            part.step()
            part.zero_grad()
    assert all(map(torch.equal, together.parameters(), apart.parameters()))
    assert isinstance(optimizer, MuonAndAdamW)
    assert optimizer.state.keys() == set(together.parameters())


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.name}-{s.momentum}")
def test_the_memory_estimate_counts_what_is_kept(section: OptimizerSection) -> None:
    model = model_of()
    optimizer = build_optimizer(model, section)
    backward(model)
    update(model, optimizer, FINITE, rate=1e-3, max_norm=1.0)
    kept = [value for state in optimizer.state.values() for value in state.values()]
    elements = sum(
        value.numel() for value in kept if isinstance(value, torch.Tensor) and value.ndim
    )
    assert elements == moment_elements(model.shape, section)


def test_what_is_left_out_has_its_usual_value() -> None:
    model = model_of()
    adamw = build_optimizer(model, OptimizerSection())
    assert isinstance(adamw, AdamW)
    assert {g["betas"] for g in adamw.param_groups} == {(0.9, 0.95)}
    assert [g["weight_decay"] for g in adamw.param_groups] == [0.1, 0.0]
    sgd = build_optimizer(model, OptimizerSection(name="sgd"))
    assert isinstance(sgd, SGD)
    assert [(g["momentum"], g["nesterov"], g["weight_decay"]) for g in sgd.param_groups] == [
        (0.9, False, 0.0)
    ] * 2


def everything(model: nn.Module, optimizer: Optimizer) -> dict[str, torch.Tensor]:
    """Copies of parameters and optimizer state, without the entries that are all zeros."""
    table = capture(model, optimizer)
    return {key: tensor.detach().clone() for key, tensor in table.items() if tensor.any()}


def same(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> bool:
    return before.keys() == after.keys() and all(torch.equal(before[k], after[k]) for k in before)


@pytest.mark.parametrize("steps_before", [0, 2])
@pytest.mark.parametrize("culprit", ["loss", "one gradient", "overflowing norm"])
@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.name}-{s.momentum}")
def test_what_is_not_finite_changes_nothing(
    section: OptimizerSection, culprit: str, steps_before: int
) -> None:
    runs = []
    for disturbed in (False, True):
        model = model_of()
        optimizer = build_optimizer(model, section)
        for _ in range(steps_before):
            backward(model)
            update(model, optimizer, FINITE, rate=1e-3, max_norm=1.0)
        if disturbed:
            before = everything(model, optimizer)
            backward(model)
            gradient = next(model.parameters()).grad
            assert gradient is not None
            if culprit != "loss":
                gradient[3, 5] = math.nan if culprit == "one gradient" else 1e30
            loss = torch.tensor(math.inf) if culprit == "loss" else FINITE
            norm = update(model, optimizer, loss, rate=1e-3, max_norm=1.0)
            assert math.isfinite(norm) == (culprit == "loss")
            assert same(before, everything(model, optimizer))
        backward(model)
        update(model, optimizer, FINITE, rate=1e-3, max_norm=1.0)
        runs.append(everything(model, optimizer))
    assert same(*runs)


def test_sgd_is_the_stock_one() -> None:
    ours, stock = model_of(), model_of()
    options: dict[str, Any] = {"weight_decay": 0.1, "momentum": 0.9, "nesterov": True}
    optimizer = build_optimizer(ours, OptimizerSection(name="sgd", **options))
    reference = SGD(
        [
            {"params": [p for p in stock.parameters() if p.ndim == 2], "weight_decay": 0.1},
            {"params": [p for p in stock.parameters() if p.ndim == 1], "weight_decay": 0.0},
        ],
        lr=0.01,
        momentum=0.9,
        nesterov=True,
        fused=True,
    )
    for _ in range(3):
        backward(ours)
        update(ours, optimizer, FINITE, rate=0.01, max_norm=0.0)
        backward(stock)
        reference.step()
        reference.zero_grad()
    assert all(map(torch.equal, ours.parameters(), stock.parameters()))


class Small(nn.Module):
    """With a parameter for each of Muon's groups."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.layers = nn.ModuleList([nn.Linear(4, 4, bias=False)])
        self.norm = nn.RMSNorm(4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.norm(self.layers[0](self.embed(tokens)))
        return logits


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: f"{s.name}-{s.momentum}")
def test_the_host_waits_for_no_number(section: OptimizerSection) -> None:
    """Tensors without data: whatever looked at a number would fail."""
    with FakeTensorMode():
        model = Small()
        optimizer = build_optimizer(model, section)
        for _ in range(2):
            model(torch.arange(7)).square().sum().backward()
            norm = update(model, optimizer, torch.tensor(1.5), rate=1e-3, max_norm=1.0)
        with pytest.raises(DataDependentOutputException):
            norm.item()
