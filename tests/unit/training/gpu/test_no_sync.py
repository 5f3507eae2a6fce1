"""A good step never makes the host wait for the device: neither for a number nor for a copy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kempner.checkpoint.format.manifest import TrainState
from kempner.config.model import AdapterSection
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.data.serve.loader import IGNORE, MicroBatch
from kempner.model.sharding import build_model
from kempner.training.compute import forward_backward, optimizer
from kempner.training.observe.metrics import AsyncMetrics

ELSEWHERE = torch.device("meta")
"""In place of a GPU: what is there has no values that the host could read. It has no autocast, of
which the loss in chunks asks: that one is watched on the CPU, where nothing is copied."""


class Syncs(TorchDispatchMode):
    """Notes what would make the host wait for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.copies = 0

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        name = func.overloadpacket.__name__
        if name in ("_local_scalar_dense", "nonzero", "is_nonzero", "equal"):
            self.found.append(name)
            if name == "_local_scalar_dense":
                return 1.0
        source = args[1] if name == "copy_" else args[0] if args else None
        target = args[0].device if name == "copy_" else given.get("device")
        if name in ("_to_copy", "copy_") and target is not None and source.device != target:
            self.copies += 1
            hurried = given.get("non_blocking", args[2] if name == "copy_" and args[2:] else False)
            if not hurried:
                self.found.append(f"blocking {name} of {tuple(source.shape)}")
        return func(*args, **given)


def good_step(
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[], None] = lambda: None,
    beta: float | None = None,
) -> Syncs:
    """What the second step of a small model waits for, after `plant` was called; with `beta` it
    learns from preferences."""
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    train = TrainSection(loss_chunk=0 if device == ELSEWHERE else 8)
    config = Config(
        model=ModelSection(dim=16, n_layers=2, n_heads=2, ffn_dim=24),
        train=train,
        adapter=AdapterSection(rank=None if beta is None else 2),
    )
    model = build_model(config, 31, torch.device("cpu"), None).to(device)
    adamw = optimizer.build_optimizer(model, config.optimizer)
    metrics = AsyncMetrics()
    tokens = torch.arange(20).view(2, 10)
    batches = [MicroBatch(tokens, tokens), MicroBatch(tokens, torch.full_like(tokens, IGNORE))]
    if beta is not None:
        documents = torch.arange(20, dtype=torch.int32).view(2, 10) % 10 // 3
        batches = [each._replace(documents=documents) for each in batches]

    def step(number: int) -> None:
        gradient = forward_backward.StepGradient(model, device, seed=0, rank=0, beta=beta)
        means = gradient.add(batches, number)
        norm = optimizer.update(model, adamw, means[0], 1e-3, 1.0)
        metrics.send(TrainState(step=number), means, norm, 1e-3)

    step(1)  # allocates the optimizer's state
    plant()
    with Syncs() as syncs:
        step(2)
    return syncs


def test_a_good_step_makes_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    syncs = good_step(ELSEWHERE, monkeypatch)
    assert syncs.found == []
    assert good_step(torch.device("cpu"), monkeypatch).found == []
    assert good_step(ELSEWHERE, monkeypatch, beta=0.1).found == []
    assert syncs.copies >= 4, "inputs and targets of both micro batches are copied"


def count_on_the_host(value: Tensor) -> Tensor:
    return value + torch.tensor(20.0).to(value.device)


def read_the_norm(*args: Any, real: Callable[..., Tensor] = optimizer.clip_gradients) -> Tensor:
    norm = real(*args)
    norm.item()
    return norm


@pytest.mark.parametrize(
    ("module", "name", "planted", "found"),
    [
        (forward_backward, "sum_over_ranks", count_on_the_host, "blocking _to_copy of ()"),
        (optimizer, "clip_gradients", read_the_norm, "_local_scalar_dense"),
    ],
)
def test_a_wait_is_noticed(
    module: Any, name: str, planted: object, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    syncs = good_step(ELSEWHERE, monkeypatch, lambda: monkeypatch.setattr(module, name, planted))
    assert found in syncs.found
