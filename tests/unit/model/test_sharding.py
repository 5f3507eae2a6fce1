"""What a sharded model computes in, without processes to share it with."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.sharding import build_model, compute_dtype

CPU = torch.device("cpu")


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Two ranks, of which this is the first and the other is not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


def config(dtype: str) -> Config:
    return Config(
        model=ModelSection(dim=16, n_layers=2, n_heads=2, ffn_dim=32),
        train=TrainSection.model_validate({"dtype": dtype}),
    )


@pytest.mark.parametrize(
    ("asked", "device", "used"),
    [
        ("auto", "cpu", torch.float32),
        ("auto", "cuda", torch.bfloat16),
        ("float32", "cuda", torch.float32),
        ("bfloat16", "cpu", torch.bfloat16),
    ],
)
def test_compute_type(asked: str, device: str, used: torch.dtype) -> None:
    assert compute_dtype(asked, torch.device(device)) is used


@pytest.mark.parametrize(("dtype", "used"), [("bfloat16", torch.bfloat16), ("auto", torch.float32)])
def test_blocks_compute_in_that_type_and_positions_stay_exact(
    mesh: DeviceMesh, dtype: str, used: torch.dtype
) -> None:
    model = build_model(config(dtype), 29, CPU, mesh)
    seen: list[tuple[torch.dtype, ...]] = []

    def look(attention: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        weight = attention.get_parameter("wq.weight")
        seen.append((weight.dtype, *(tensor.dtype for tensor in inputs[:3])))

    for layer in model.layers:
        layer.get_submodule("attention").register_forward_pre_hook(look)
    with torch.no_grad():
        logits = model(torch.zeros(1, 4, dtype=torch.int64))
    assert logits.dtype is torch.float32
    assert seen == [(used, used, torch.float32, torch.float32)] * 2
    assert all(parameter.dtype is torch.float32 for parameter in model.parameters())


def test_a_mesh_of_one_is_no_reason_to_shard() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        model = build_model(config("auto"), 29, CPU, init_device_mesh("cpu", (1,)))
    finally:
        dist.destroy_process_group()
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
