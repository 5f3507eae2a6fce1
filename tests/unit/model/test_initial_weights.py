"""Initial weights depend on seed and name, and on nothing else."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.model.initial_weights import initialise
from kempner.model.sharding import build_model
from kempner.model.transformer import Transformer

CPU = torch.device("cpu")
SECTION = ModelSection(dim=80, n_layers=2, n_heads=4, n_kv_heads=2, ffn_dim=200)
VOCAB = 257


def build(seed: int = 7, mesh: DeviceMesh | None = None) -> Transformer:
    return build_model(Config(model=SECTION, train=TrainSection(seed=seed)), VOCAB, CPU, mesh)


@contextmanager
def pretending(rank: int, sizes: tuple[int, ...]) -> Iterator[DeviceMesh]:
    """A mesh of ranks that are not there: shards are true, collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(sizes))
    try:
        # Named after the rank, since torch takes what it remembers for an equal mesh from it.
        names = tuple(f"dim{dim}-of-rank{rank}" for dim in range(len(sizes)))
        yield init_device_mesh("cpu", sizes, mesh_dim_names=names)
    finally:
        dist.destroy_process_group()


def place(whole: Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """Every rank cuts its part out of its own copy: there is no rank to send it."""
    return distribute_tensor(whole, mesh, placements, src_data_rank=None)


def local_part(whole: Tensor, placed: DTensor) -> Tensor:
    """What a placement gives this rank of the whole, by torch's own reckoning."""
    return place(whole, placed.device_mesh, placed.placements).to_local()


def test_same_seed_same_bits_and_another_seed_others() -> None:
    first, second, other = (build(seed).state_dict() for seed in (7, 7, 8))
    for name, value in first.items():
        assert torch.equal(value, second[name])
        assert name.endswith("norm.weight") or not torch.equal(value, other[name])


def test_the_stream_has_not_changed() -> None:
    first = build().state_dict()["embed.weight"][0, :3]
    torch.testing.assert_close(first, torch.tensor(FIRST_VALUES), rtol=1e-5, atol=1e-7)


FIRST_VALUES = [0.0116121359, 0.0261535980, -0.0593281575]


def test_global_random_state_is_neither_read_nor_moved() -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = build().state_dict()["output.weight"]
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(build().state_dict()["output.weight"], first)


def test_spread_is_as_stated() -> None:
    for name, value in build().state_dict().items():
        if name.endswith("norm.weight"):
            assert torch.equal(value, torch.ones(80))
            continue
        residual = name.endswith(("wo.weight", "w2.weight"))
        std = 0.02 / math.sqrt(2 * 2) if residual else 0.02
        error = 4 / math.sqrt(2 * value.numel())  # four standard errors of a standard deviation
        assert value.std().item() == pytest.approx(std, rel=error)
        assert abs(value.mean().item()) < 4 * std / math.sqrt(value.numel())


def test_no_rows_repeat() -> None:
    state = build().state_dict()
    rows = torch.cat(
        [v for n, v in state.items() if not n.endswith("norm.weight") and v.shape[1] == 80]
    )
    assert len({tuple(row) for row in rows[:, :4].tolist()}) == len(rows)


@pytest.mark.parametrize("world", [2, 3, 5, 300])
def test_shards_of_every_world_are_parts_of_the_same_whole(world: int) -> None:
    whole = build().state_dict()
    for rank in {0, 1, world // 2, world - 1}:
        with pretending(rank, (world,)) as mesh:
            model = build(mesh=mesh)
            for name, placed in model.named_parameters():
                assert isinstance(placed, DTensor)
                assert torch.equal(placed.to_local(), local_part(whole[name], placed)), name
            assert torch.equal(model.rotary, build().rotary)


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [
        ((4,), [Shard(1)]),
        ((3,), [Shard(1)]),
        ((4,), [Replicate()]),
        ((2, 3), [Shard(0), Shard(1)]),
        ((2, 3), [Replicate(), Shard(0)]),
        ((2, 2), [Shard(0), Shard(0)]),
    ],
)
def test_any_placement_gets_its_part(sizes: tuple[int, ...], placements: list[Placement]) -> None:
    whole = build().state_dict()
    for rank in range(math.prod(sizes)):
        with pretending(rank, sizes) as mesh:
            model = build(seed=0)
            replace_matrices(model, mesh, placements)
            initialise(model, seed=7)
            for name, placed in model.named_parameters():
                if isinstance(placed, DTensor):
                    assert torch.equal(placed.to_local(), local_part(whole[name], placed)), name


def replace_matrices(model: nn.Module, mesh: DeviceMesh, placements: Sequence[Placement]) -> None:
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(weight, nn.Parameter) and weight.ndim == 2:
            module.weight = nn.Parameter(place(weight.detach(), mesh, placements))
