"""`Slots` in a process that is alone: what it adds up, which samples are whose, what it refuses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import Shard, distribute_module

from kempner import Slots, UsageError


def test_the_gradient_is_that_of_the_sum_also_of_what_a_slot_leaves_out() -> None:
    torch.manual_seed(1)
    model, x = nn.ModuleDict({"used": nn.Linear(3, 2), "rare": nn.Linear(3, 2)}), torch.randn(5, 3)
    model["frozen"] = nn.Linear(3, 2).requires_grad_(False)
    model.double()

    def loss_of(slot: int) -> torch.Tensor:
        names = ("used", "rare") if slot == 3 else ("used",)
        return sum(
            (model[name](x[slot].double()).square().sum() for name in names), torch.zeros(())
        )

    slots = Slots(model, 5)
    for step in (1, 2):  # the second one begins anew
        for slot in slots.of(step):
            slots.add(loss_of(slot))
        loss = slots.sum()
        norm = slots.clip(0)
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()
    whole = sum((loss_of(slot) for slot in range(5)), torch.zeros(()))
    whole.backward()
    torch.testing.assert_close(loss, whole.detach().double())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found[name], parameter.grad)
    torch.testing.assert_close(slots.clip(0.5), norm)
    torch.testing.assert_close(slots.clip(0), torch.tensor(0.5))
    assert norm > 1


@given(st.integers(1, 7), st.integers(1, 4), st.integers(1, 40), st.integers(0, 3))
def test_each_sample_is_in_one_slot_of_an_epoch(
    total: int, size: int, dataset: int, seed: int
) -> None:
    slots = Slots(nn.Linear(1, 1), total, seed=seed)
    taken = []
    for step in range(1, 3 + dataset * 2 // (total * size)):
        for slot in slots.of(step):
            taken += slots.samples(slot, size, dataset)
            slots.add(sum((p.sum() for p in slots._parameters), torch.zeros(())))
    for epoch in (0, 1):
        assert sorted(taken[epoch * dataset :][:dataset]) == list(range(dataset))


def test_a_slot_draws_the_same_whatever_was_drawn_before() -> None:
    model = nn.Linear(1, 1)
    drawn = []
    for before in (0, 5):
        slots = Slots(model, 3, seed=4)
        torch.rand(before)
        for _ in slots.of(2):
            drawn.append(torch.rand(()).item())
            torch.rand(before)
            slots.add(model(torch.ones(1)).sum())
    assert drawn[:3] == drawn[3:]
    assert len(set(drawn)) == 3


def test_what_cannot_be_the_same_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1, 1)
    slots = Slots(model, 2)
    with pytest.raises(UsageError, match="after the last slot"):
        slots.sum()
    with pytest.raises(UsageError, match="got no gradient"):
        list(slots.of(1))
    with pytest.raises(UsageError, match="call it after slots"):
        slots.clip(1.0)
    for _ in slots.of(1):
        slots.add(model(torch.ones(1)).sum())
    with pytest.raises(UsageError, match="once for each slot"):
        slots.add(model(torch.ones(1)).sum())
    with pytest.raises(UsageError, match="no parameter of the model trains"):
        Slots(nn.Linear(1, 1).requires_grad_(False), 2)
    for name, value in (("RANK", 0), ("WORLD_SIZE", 2), ("LOCAL_RANK", 0), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(UsageError, match="call it after torch"):
        Slots(model, 2)


def test_of_shards_only_rows_on_a_mesh_of_all_ranks_are_taken() -> None:
    """What `fully_shard` can do, and what Slots knows of it."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("a", "b"))

    def sharded(whole: bool = True, **options: Any) -> nn.Module:
        model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
        if options.get("ignored_params"):
            options["ignored_params"] = {model[0].bias}
        for part in (model[0], model) if whole else (model[0],):
            fully_shard(part, **{"mesh": mesh, **options})
        return model

    def of_tensor_ranks() -> nn.Module:
        model = distribute_module(nn.Linear(2, 2), mesh["a"])
        fully_shard(model, mesh=mesh["b"])
        return model

    try:
        Slots(sharded(), 2)
        Slots(sharded(mesh=mesh["b"]), 2)
        for model, why in (
            (sharded(whole=False), "is not sharded as a whole"),
            (distribute_module(nn.Linear(2, 2), mesh["b"]), "is not sharded as a whole"),
            (of_tensor_ranks(), "cannot add up"),
            (sharded(ignored_params=True), "0.bias trains and is not sharded"),
            (sharded(shard_placement_fn=lambda p: Shard(p.ndim - 1)), "cannot add up"),
            (sharded(offload_policy=CPUOffloadPolicy(pin_memory=False)), "cannot add up"),
        ):
            with pytest.raises(UsageError, match=why):
                Slots(model, 2)
        with pytest.raises(UsageError, match="Slots no group"):
            Slots(sharded(), 2, group=dist.group.WORLD)
    finally:
        dist.destroy_process_group()
