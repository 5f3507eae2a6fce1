"""The gradient along the tree of slots is the gradient."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from kempner.cluster.world import World
from kempner.config.sections import Config
from kempner.config.site import DistributedSection
from kempner.data.serve.loader import MicroBatch
from kempner.model.sharding import build_model
from kempner.training.compute.forward_backward import StepGradient
from kempner.training.compute.slot_gradient import SlotGradient
from kempner.training.groups.process_groups import adopt

CPU, VOCAB = torch.device("cpu"), 31


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    adopt(World(0, 1, 0, 1, "none"), CPU, DistributedSection(timeout=60.0))
    yield
    dist.destroy_process_group()


def whole(gradient: Tensor | None) -> Tensor:
    assert gradient is not None
    found: Tensor = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return found


@pytest.mark.parametrize("tied", [False, True])
def test_every_parameter_has_the_gradient_of_other_runs(tied: bool) -> None:
    sizes = {"dim": 16, "n_layers": 2, "n_heads": 2, "ffn_dim": 24, "tie_embeddings": tied}
    tokens = torch.randint(0, VOCAB, (3, 2, 9), generator=torch.Generator().manual_seed(1))
    batches = [MicroBatch(each[:, :-1], each[:, 1:]) for each in tokens]
    found = []
    for tree in (False, True):
        train = {"threads": 1, "same_on_any_world": tree or None}
        asked = Config.model_validate({"model": sizes, "train": train})
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",)) if tree else None
        model = build_model(asked, VOCAB, CPU, mesh)
        if tree:
            assert mesh is not None
            loss = SlotGradient(model, CPU, 0, len(batches), mesh).add(batches, 1)
        else:
            loss = StepGradient(model, CPU, 0, 0).add(batches, 1)
        gradients = {name: whole(parameter.grad) for name, parameter in model.named_parameters()}
        found.append({"loss": loss, **gradients})
    plain, by_slots = found
    torch.testing.assert_close(by_slots, plain)
    assert all(gradient.abs().max() > 0 for gradient in by_slots.values())
