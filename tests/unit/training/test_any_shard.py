"""The bits of an update and of a norm do not depend on where a shard ends."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.optim import SGD, AdamW, NAdam, Optimizer, RMSprop

from kempner.config.sections import OptimizerSection
from kempner.training.compute.any_shard import exact_norm, fold, whole_vectors
from kempner.training.compute.optimizer import build_optimizer


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    world = dist.group.WORLD
    assert world is not None
    yield world
    dist.destroy_process_group()


def drawn(rows: int, width: int, seed: int) -> Tensor:
    """Numbers of many sizes, of both signs."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-30, 20, (rows, width), generator=generator)
    return torch.ldexp(torch.randn(rows, width, generator=generator), sizes)


def cut(whole: Tensor, at: Sequence[int]) -> list[Tensor]:
    return [part.contiguous() for part in whole.tensor_split(sorted(at))]


SHARDS = st.lists(st.integers(0, 13), max_size=6)


@given(at=SHARDS, width=st.integers(1, 40), seed=st.integers(0, 9))
def test_the_norm_is_the_same_in_any_shards(
    group: dist.ProcessGroup, at: list[int], width: int, seed: int
) -> None:
    whole = drawn(13, width, seed)
    norm = exact_norm([whole], group)
    shards = cut(whole, at)
    assert torch.equal(exact_norm(shards, group), norm)
    assert torch.equal(exact_norm(shards[::-1], group), norm)
    assert torch.equal(exact_norm([whole], None), norm)
    assert norm.item() == pytest.approx(whole.double().norm().item(), rel=1e-6)


@pytest.mark.parametrize("wrong", [math.inf, -math.inf, math.nan, 1e30])
def test_a_norm_that_is_not_finite_is_seen(group: dist.ProcessGroup, wrong: float) -> None:
    assert not exact_norm([torch.ones(3), torch.tensor([1.0, wrong])], group).isfinite()
    assert exact_norm([torch.zeros(2, 3), torch.tensor([1e-44])], group) == 0
    assert exact_norm([torch.tensor(3.0), torch.tensor([4.0], dtype=torch.float64)], None) == 5


def test_a_fold_adds_in_one_order() -> None:
    assert fold(torch.tensor([[1.0, 2, 3, 4, 5], [1, 1, 1, 1, 1]])).tolist() == [15, 5]


def moved(shards: list[Tensor], section: OptimizerSection) -> Tensor:
    """The rows after three updates of each shard by itself."""
    parameters = [nn.Parameter(shard.clone()) for shard in shards]
    model = nn.ParameterList(parameters)
    optimizer = build_optimizer(model, section, any_shard=True)
    for step in range(1, 4):
        for parameter, shard in zip(parameters, shards, strict=True):
            parameter.grad = (shard * step).sin()
        optimizer.step()
    return torch.cat([parameter.detach() for parameter in parameters])


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_an_update_is_the_same_in_any_shards(name: str) -> None:
    section = OptimizerSection.model_validate({"name": name, "lr": 0.01, "weight_decay": 0.1})

    @given(at=SHARDS, width=st.integers(1, 40))
    def check(at: list[int], width: int) -> None:
        whole = drawn(13, width, 1)
        assert torch.equal(moved(cut(whole, at), section), moved([whole], section))

    check()


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize(
    "optimizer",
    [
        partial(AdamW, weight_decay=0.1),
        partial(SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.1),
        partial(RMSprop, momentum=0.5),
        partial(NAdam, weight_decay=0.1),
    ],
)
def test_torchs_optimizers_are_the_same_in_any_shards_unless_they_are_fused(
    optimizer: Callable[..., Optimizer], foreach: bool
) -> None:
    """Of float32; with `fused=True` the last elements of a shard differ."""

    def moved(shards: list[Tensor]) -> Tensor:
        parameters = [nn.Parameter(shard.clone()) for shard in shards]
        moves = optimizer(parameters, foreach=foreach)
        for step in range(1, 4):
            for parameter, shard in zip(parameters, shards, strict=True):
                parameter.grad = (shard * step).sin()
            moves.step()
        return torch.cat([parameter.detach() for parameter in parameters])

    @settings(max_examples=20)
    @given(at=SHARDS, width=st.integers(1, 40))
    def check(at: list[int], width: int) -> None:
        whole = drawn(13, width, 1)
        assert torch.equal(moved(cut(whole, at)), moved([whole]))

    check()


def test_every_tensor_is_made_of_whole_vectors() -> None:
    tensors = [torch.arange(float(n)).view(shape) for n, shape in ((35, (5, 7)), (32, (32,)))]
    with whole_vectors(tensors) as (given_,):
        assert all(tensor.numel() % 16 == 0 for tensor in given_)
        for tensor in given_:
            tensor += 1
    assert [tensor.flatten().tolist() for tensor in tensors] == [
        list(range(1, 36)),
        list(range(1, 33)),
    ]
