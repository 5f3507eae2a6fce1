"""What the ranks of a world know when they choose, which must be the same for all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from kempner.cluster.world import World
from kempner.config.model import ParallelismSection
from kempner.config.sections import Config, ModelSection, TrainSection
from kempner.config.site import DistributedSection
from kempner.model.spec.communication import Choice
from kempner.training.compute.forward_backward import choose_communication
from kempner.training.groups.process_groups import Ranks, adopt

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
CONFIG = Config(
    model=ModelSection(dim=2048, n_layers=16, n_heads=16, ffn_dim=8192),
    train=TrainSection(global_batch_size=64, seq_len=512),
)


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Ranks]:
    """Two nodes of four GPUs, of which this is the first rank and the others are not there."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    monkeypatch.setattr(dist, "new_group", lambda **_: dist.group.WORLD)
    try:
        with mock.patch.dict(os.environ):  # it names the interface there
            yield adopt(World(0, 8, 0, 4, "kempner"), CPU, DistributedSection(timeout=60.0))
    finally:
        dist.destroy_process_group()


def gpus_of(gigabytes: float, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(total_memory=int(gigabytes * 1e9))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def test_cpu_ranks_ask_nobody(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(dist, "all_reduce")
    assert choose_communication(CONFIG, 32000, ranks) == replace(
        Choice(), reason="it takes least memory, which the CPU ranks of a node share"
    )


@pytest.mark.parametrize(
    ("gigabytes", "expected"), [(85.0, (True, True)), (8.5, (False, True)), (3.0, (False, False))]
)
def test_the_gpu_decides(
    ranks: Ranks,
    monkeypatch: pytest.MonkeyPatch,
    gigabytes: float,
    expected: tuple[bool, bool],
) -> None:
    gpus_of(gigabytes, monkeypatch)
    choice = choose_communication(CONFIG, 32000, replace(ranks, device=GPU))
    assert (choice.reduce_once, choice.keep_parameters) == expected, choice


def test_the_smallest_gpu_of_any_rank_counts(ranks: Ranks, monkeypatch: pytest.MonkeyPatch) -> None:
    def with_a_smaller_one(tensor: torch.Tensor, op: object, group: object) -> None:
        assert (op, group) == (dist.ReduceOp.MIN, ranks.votes)
        torch.minimum(tensor, torch.tensor([2, 8 * 10**9]), out=tensor)

    gpus_of(85.0, monkeypatch)
    monkeypatch.setattr(dist, "all_reduce", with_a_smaller_one)
    choice = choose_communication(CONFIG, 32000, replace(ranks, device=GPU))
    assert "7.2 GB (0.9 of the GPU)" in choice.reason


def test_what_is_configured_is_obeyed_on_any_device(ranks: Ranks) -> None:
    section = ParallelismSection(reduce_gradients="step", reshard_after_forward="never")
    choice = choose_communication(CONFIG.model_copy(update={"parallelism": section}), 32000, ranks)
    assert (choice.reduce_once, choice.keep_parameters) == (True, True)
