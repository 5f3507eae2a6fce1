"""What a rank of a mesh holds, against what the estimate says."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.parallel.tensor import parallelize
from kempner.model.sharding import data_parallel, shard
from kempner.model.spec.memory import Estimate, estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer

DEGREES = MeshDegrees(replicate=2, shard=4, tensor=4)
SHAPE = Shape.of(
    ModelSection(dim=512, n_layers=3, n_heads=8, n_kv_heads=4, ffn_dim=1024, qk_norm=True), 4096
)


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """Ranks that are not there."""
    sizes = DEGREES.dimensions()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=DEGREES.world)
    try:
        yield init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    finally:
        dist.destroy_process_group()


def estimate(replicate: int, tensor: int, world: int) -> Estimate:
    train = TrainSection(micro_batch_size=1, seq_len=128, loss_chunk=0)
    mesh = MeshDegrees(replicate, world // replicate // tensor, tensor)
    return estimate_memory(Config(train=train), SHAPE, mesh, 2)


def test_a_rank_holds_its_shard_of_its_part(mesh: DeviceMesh) -> None:
    with torch.device("meta"):
        model = Transformer(SHAPE)
    parallelize(model, mesh["tensor"])
    shard(model, data_parallel(mesh), torch.bfloat16)
    held = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.shape == (2, 4, 4)
        held += 4 * parameter.to_local().numel()
    # The norms are whole in each tensor group: a thousandth.
    expected = estimate(DEGREES.replicate, DEGREES.tensor, DEGREES.world).parameters
    assert held == pytest.approx(expected, rel=2e-3)


def test_replicas_save_no_memory_and_tensor_groups_save_all_kinds() -> None:
    alike, twice, spread = estimate(1, 1, 8), estimate(2, 1, 16), estimate(1, 4, 8)
    assert twice == alike
    assert (spread.parameters, spread.moments) == (alike.parameters, alike.moments)
    assert spread.gathered == alike.gathered // 4
    assert spread.gradient_buffers == alike.gradient_buffers // 4
    assert spread.logits == alike.logits // 4
    assert alike.activations / 4 < spread.activations < alike.activations / 2
