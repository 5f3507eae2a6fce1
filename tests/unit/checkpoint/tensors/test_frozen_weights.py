"""What is frozen is written twice, and then linked from one checkpoint to the next."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from saved import open_manager
from torch import nn

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.format.shard_plan import base_file
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.manager import CheckpointEngine
from kempner.run.record.run_dir import RunDirectory

BASE = base_file(0, 1)


class Tuned(nn.Module):
    """Frozen weights of over 1 MiB, and a small adapter that is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Linear(600, 600).requires_grad_(False)
        self.adapter = nn.Linear(600, 1)


class Work:
    """A program that trains the adapter and saves each step."""

    def __init__(self, folder: Path, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = Tuned()
        self.optimizer = torch.optim.AdamW(self.model.adapter.parameters())
        self.run = RunDirectory(folder)
        group = dist.new_group(backend="gloo")
        self.manager: CheckpointEngine = open_manager(self.run, self.model, self.optimizer, group)

    def save(self, *steps: int) -> None:
        for step in steps:
            self.model.adapter(self.model.frozen(torch.ones(600))).sum().backward()
            self.manager.release_staging()
            self.optimizer.step()
            self.manager.save(TrainState(step))
            self.manager.join()
            assert self.manager.committed_step == step

    def path(self, step: int) -> Path:
        return self.manager._folder.step(step)

    def inode(self, step: int) -> int:
        return (self.path(step) / BASE).stat().st_ino


@pytest.fixture
def group(tmp_path: Path) -> Iterator[None]:
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def work(tmp_path: Path, group: None) -> Iterator[Work]:
    work = Work(tmp_path / "run")
    yield work
    work.manager.close()


def test_neighbours_have_files_of_their_own_and_others_share_them(work: Work) -> None:
    inodes = {}
    for step in range(1, 7):
        work.save(step)
        inodes[step] = work.inode(step)
    assert len(set(inodes.values())) == 2
    assert all(inodes[step] != inodes[step + 1] for step in range(1, 6))
    assert [verify(work.path(step)) for step in (5, 6)] == [[], []]


def test_the_stock_reader_finds_frozen_and_trained_weights(work: Work) -> None:
    work.save(1, 2, 3)
    found = {f"model.{k}": torch.zeros_like(v) for k, v in work.model.state_dict().items()}
    dcp.load(found, checkpoint_id=work.path(3), no_dist=True)
    for key, value in work.model.state_dict().items():
        assert torch.equal(found[f"model.{key}"], value)


def test_a_resumed_run_links_after_it_has_read_the_file(work: Work, tmp_path: Path) -> None:
    work.save(1, 2)
    first = work.inode(1)
    again = Work(tmp_path / "run", seed=1)
    assert again.manager.restore() == TrainState(2)
    assert torch.equal(again.model.frozen.weight, work.model.frozen.weight)
    again.save(3)
    assert again.inode(3) == first
    again.manager.close()


def test_a_damaged_file_costs_one_checkpoint_and_is_not_linked_again(
    work: Work, tmp_path: Path
) -> None:
    work.save(1, 2, 3)
    file = work.path(3) / BASE
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    again = Work(tmp_path / "run", seed=1)
    assert again.manager.restore() == TrainState(2)
    again.save(3, 4)
    assert [verify(again.path(step)) for step in (3, 4)] == [[], []]
    again.manager.close()


def test_frozen_weights_that_change_unseen_are_written(work: Work) -> None:
    """As a copy of the weights that follows them, which is never trained itself."""
    work.save(1, 2)
    work.model.frozen.weight.data.mul_(2)
    work.save(3)
    assert work.inode(3) != work.inode(2)
    found = {"model.frozen.weight": torch.zeros(600, 600)}
    dcp.load(found, checkpoint_id=work.path(3), no_dist=True)
    assert torch.equal(found["model.frozen.weight"], work.model.frozen.weight)


def test_weights_that_are_trained_from_now_on_leave_the_base(work: Work) -> None:
    work.save(1, 2)
    work.optimizer.add_param_group({"params": work.model.frozen.requires_grad_(True).parameters()})
    work.save(3)
    assert not (work.path(3) / BASE).exists()
    assert verify(work.path(3)) == []


def test_without_links_each_checkpoint_has_a_file(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, target: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted", str(target))

    monkeypatch.setattr(os, "link", refuse)
    work.save(1, 2, 3)
    assert len({work.inode(step) for step in (2, 3)}) == 2
    assert verify(work.path(3)) == []
