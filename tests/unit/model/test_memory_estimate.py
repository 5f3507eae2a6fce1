"""The memory estimate against what models really hold, and configs/train/7b.toml against both."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.config.integrity import IntegritySection
from kempner.config.loading import load
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.sharding import build_model, shard
from kempner.model.spec.communication import EACH_MICRO_BATCH, Choice
from kempner.model.spec.memory import Estimate, activation_bytes_per_token, estimate_memory
from kempner.model.spec.mesh import MeshDegrees
from kempner.model.spec.shape import Shape
from kempner.model.transformer import Transformer

CONFIG_7B = Path(__file__).parents[3] / "configs/train/7b.toml"
NODES, GPUS = 8, 4
WORLD = NODES * GPUS
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def grid() -> Iterator[DeviceMesh]:
    """8 nodes of 4 GPUs that are not there, as the one row of ranks that parameters go over."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    try:
        yield init_device_mesh("cpu", (NODES, GPUS), mesh_dim_names=("node", "gpu"))._flatten()
    finally:
        dist.destroy_process_group()


def estimate_for(config: Config, world: int, vocab_size: int) -> Estimate:
    train = config.train.model_copy(update={"loss_chunk": 0})
    config, shape = config.model_copy(update={"train": train}), Shape.of(config.model, vocab_size)
    return estimate_memory(config, shape, MeshDegrees(shard=world), compute_bytes=2)


def test_7b_has_the_sizes_of_llama_2() -> None:
    config = load(CONFIG_7B)
    shape = Shape.of(config.model, config.model.vocab_size or 0)
    assert shape == Shape(
        dim=4096,
        n_layers=32,
        n_heads=32,
        n_kv_heads=32,
        head_dim=128,
        ffn_dim=11008,
        vocab_size=32000,
        max_seq_len=4096,
        rope_theta=10_000.0,
        norm_eps=1e-5,
        tie_embeddings=False,
        dropout=0.0,
    )
    assert shape.parameters == 6_738_415_616


def test_7b_is_sharded_as_estimated_and_fits(grid: DeviceMesh) -> None:
    config = load(CONFIG_7B)
    with torch.device("meta"):
        model = Transformer(Shape.of(config.model, 32000))
    assert sum(p.numel() for p in model.parameters()) == 6_738_415_616
    shard(model, grid, torch.bfloat16)
    estimate = estimate_for(config, WORLD, 32000)
    # All row counts are multiples of 32: the estimate of the shards is exact.
    assert local_bytes(model) == estimate.parameters == estimate.gradients
    assert estimate.moments == 2 * estimate.parameters
    assert 21e9 < estimate.total < 24e9


def local_bytes(model: Transformer) -> int:
    """Bytes of this rank's shards."""
    total = 0
    for parameter in model.parameters():
        assert isinstance(parameter, DTensor)
        local = parameter.to_local()
        total += local.numel() * local.element_size()
    return total


def test_uneven_shards_exceed_the_estimate_by_a_row_at_most(grid: DeviceMesh) -> None:
    section = ModelSection(dim=144, n_layers=2, n_heads=3, ffn_dim=500)
    model = build_model(Config(model=section), 257, CPU, grid)
    estimate = estimate_for(Config(model=section), WORLD, 257).parameters
    rows = sum(4 * (p[0].numel() if p.ndim > 1 else 1) for p in model.parameters())
    assert estimate < local_bytes(model) <= estimate + rows


@pytest.mark.parametrize(
    "section",
    [
        ModelSection(dim=64, n_layers=3, n_heads=4, ffn_dim=160),
        ModelSection(dim=64, n_layers=1, n_heads=4, n_kv_heads=1, head_dim=24, ffn_dim=160),
        ModelSection(dim=64, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=160, qk_norm=True),
    ],
)
def test_activations_are_counted_to_the_byte(section: ModelSection) -> None:
    """On CPU, after the one float32 tensor per norm of heads that a fused one does not keep."""
    rows, length = 2, 32
    model = build_model(Config(model=section, train=TrainSection(seq_len=length)), 257, CPU, None)
    fused = activation_bytes_per_token(model.shape, compute_bytes=4)
    in_heads = (model.shape.q_dim + model.shape.kv_dim) if section.qk_norm else 0
    unfused = fused + 4 * section.n_layers * in_heads
    assert (
        saved_bytes(model, torch.zeros(rows, length, dtype=torch.int64)) == rows * length * unfused
    )


def saved_bytes(model: Transformer, tokens: Tensor) -> int:
    """Bytes that a forward keeps for the backward, besides the model's own."""
    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def keep(tensor: Tensor) -> Tensor:
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        logits = model(tokens)
    logits_place = logits.untyped_storage().data_ptr()
    return sum(t.untyped_storage().nbytes() for p, t in kept.items() if p != logits_place)


def test_parts_follow_their_formulas() -> None:
    shape = Shape.of(ModelSection(dim=64, n_layers=3, n_heads=4, ffn_dim=160), 257)
    config = Config(train=TrainSection(micro_batch_size=2, seq_len=32, loss_chunk=0))
    one, two = MeshDegrees(shard=1), MeshDegrees(shard=2)
    alone = estimate_memory(config, shape, one, 2)
    assert alone.parameters == alone.gradients == 4 * shape.parameters
    assert alone.gathered == 2 * shape.parameters
    assert alone.gradient_buffers == 0
    exact = estimate_memory(config, shape, one, 4)
    assert exact.gathered == 0
    pair = estimate_memory(config, shape, two, 2)
    assert pair.parameters == 2 * shape.parameters
    assert pair.gathered == 2 * (shape.head_parameters + 2 * shape.block_parameters)
    assert pair.gradient_buffers == 6 * max(shape.head_parameters, shape.block_parameters)
    # A rank that is alone computes under autocast, which keeps two tensors of SwiGLU more.
    assert alone.activations == pair.activations + (2 * 32) * 3 * 2 * 2 * 160
    once = estimate_memory(config, shape, two, 2, Choice(reduce_once=True))
    assert once == replace(pair, gradients=4 * shape.parameters)
    kept = estimate_memory(config, shape, two, 2, Choice(keep_parameters=True))
    assert kept == replace(pair, gathered=2 * (shape.parameters + shape.block_parameters))
    assert alone == estimate_memory(config, shape, one, 2, Choice(True, True))
    assert pair.logits == 2 * 32 * 16 * 257
    in_chunks = Config(train=TrainSection(micro_batch_size=2, seq_len=32, loss_chunk=10))
    chunked = estimate_memory(in_chunks, shape, two, 2)
    assert chunked.logits == 10 * 257 * (2 + 4 + 4) + 4 * 257 * 64


@pytest.mark.parametrize(("world", "kept"), [(1, 4), (2, 3), (3, 3)])
def test_the_same_on_any_world_keeps_whole_gradients(world: int, kept: int) -> None:
    """Eight slots: on one rank 2^3, so sums of 4, 2 and 1 slots and the newest one."""
    train = TrainSection(global_batch_size=8, threads=1, same_on_any_world=True)
    config = Config(model=ModelSection(), train=train)
    once = Choice(reduce_once=True)
    found = estimate_memory(config, Shape.of(config.model, 257), MeshDegrees(shard=world), 2, once)
    assert found.gradients == kept * 4 * Shape.of(config.model, 257).parameters
    assert found.gathered > 0
    plain = estimate_memory(config, Shape.of(config.model, 257), MeshDegrees(shard=world), 4, once)
    assert (plain.gathered + plain.gradient_buffers == 0) == (world == 1)


def test_a_check_of_a_step_has_two_gradients_more_and_sends_to_every_replica() -> None:
    """What real steps hold is measured in tests/distributed/plan/test_traced_memory.py."""
    train = TrainSection(global_batch_size=64, threads=1, same_on_any_world=True)
    config = Config(train=train, integrity=IntegritySection(recompute_interval=10))
    shape, once = Shape.of(ModelSection(dim=1024), 32000), Choice(reduce_once=True)
    for replicas in (1, 3):
        mesh = MeshDegrees(replicate=replicas, shard=8)
        found = estimate_memory(config, shape, mesh, 2, once)
        sent = (replicas - 1) * found.gradient_buffers
        assert found.recomputation == 2 * found.parameters + sent


@pytest.mark.parametrize("world", [2, 3, 8])
def test_slots_in_turn_keep_a_ranks_rows(world: int) -> None:
    """Four sums, as on one rank that has all slots, and FSDP's own gradient."""
    train = TrainSection(global_batch_size=8, threads=1, same_on_any_world=True)
    config = Config(model=ModelSection(), train=train)
    shape, mesh = Shape.of(config.model, 257), MeshDegrees(shard=world)
    found = estimate_memory(config, shape, mesh, 2, EACH_MICRO_BATCH)
    assert found.gradients == 5 * 4 * -(-shape.parameters // world)
