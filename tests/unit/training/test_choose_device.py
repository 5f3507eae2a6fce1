"""Which GPU a rank drives, by how many it sees."""

from __future__ import annotations

import pytest
import torch

from kempner.cluster.machine import own_part
from kempner.cluster.world import World
from kempner.run.process.exit_codes import UsageError
from kempner.training.groups.process_groups import choose_device


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """A machine with GPUs, as far as torch is asked."""
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    return chosen


@pytest.mark.parametrize(
    ("visible", "local_rank", "device"), [(4, 0, "cuda:0"), (4, 3, "cuda:3"), (1, 3, "cuda:0")]
)
def test_each_rank_drives_a_gpu_of_its_own(
    chosen: list[torch.device],
    monkeypatch: pytest.MonkeyPatch,
    visible: int,
    local_rank: int,
    device: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible)
    found = choose_device(World(4 + local_rank, 8, local_rank, 4, "srun"))
    assert str(found) == device
    assert chosen == [found]


def test_more_ranks_than_gpus_are_refused(
    chosen: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UsageError, match="local rank 2 has no GPU: 2 are visible for 4 ranks"):
        choose_device(World(2, 4, 2, 4, "srun"))
    assert not chosen


@pytest.mark.parametrize(
    ("visible", "local_rank", "own"),
    [
        ("MIG-aa,MIG-bb,MIG-cc", 1, "MIG-bb"),
        ("MIG-GPU-1/3/0,MIG-GPU-1/4/0", 0, "MIG-GPU-1/3/0"),
        ("MIG-aa,MIG-bb", 2, None),  # which more ranks than GPUs then refuses
        ("MIG-aa", 1, None),
        ("0,1,2,3", 1, None),
        ("GPU-aa,GPU-bb", 1, None),
        ("", 0, None),
    ],
)
def test_a_rank_among_parts_of_gpus_sees_its_own(
    visible: str, local_rank: int, own: str | None
) -> None:
    assert own_part({"CUDA_VISIBLE_DEVICES": visible}, local_rank) == own
