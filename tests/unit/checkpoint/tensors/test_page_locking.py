"""The buffer of a checkpoint on a machine with GPUs, of which only the calls can be seen here."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from saved import open_manager

from kempner.checkpoint.format import shard_plan
from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.tensors import staging
from kempner.checkpoint.tensors.file_buffer import FileBuffer, container, tensor_specs
from kempner.cluster.machine import MemoryGroup
from kempner.run.record.run_dir import RunDirectory

CPU = torch.device("cpu")


class Cudart:
    """Notes the ranges that are registered."""

    def __init__(self) -> None:
        self.answer = 0
        self.ranges: dict[int, int] = {}

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:
        if self.answer == 0:
            self.ranges[address] = length
        return self.answer

    def cudaHostUnregister(self, address: int) -> int:
        del self.ranges[address]
        return 0


@pytest.fixture
def cudart(monkeypatch: pytest.MonkeyPatch) -> Cudart:
    fake = Cudart()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    return fake


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr(staging, "logger", lambda: SimpleNamespace(warning=said.append))
    return said


def image_of(elements: int) -> FileBuffer:
    specs = tensor_specs({"weight": torch.zeros(elements)}, 1)
    return FileBuffer(shard_plan.place(specs, 0, container))


def test_exactly_the_buffer_is_locked_while_it_lives(cudart: Cudart, warnings: list[str]) -> None:
    image = image_of(5000)
    length = len(image.content)
    assert length & (length - 1), "a power of two would hide rounding"
    assert staging.page_lock(image, 2 * length, CPU)
    assert cudart.ranges == {image.address: length}
    del image
    gc.collect()
    assert not cudart.ranges
    assert not warnings


def test_a_buffer_without_room_stays_pageable_with_one_warning(
    cudart: Cudart, warnings: list[str]
) -> None:
    image = image_of(5000)
    assert not staging.page_lock(image, 2 * len(image.content) - 1, CPU)
    assert not cudart.ranges
    assert len(warnings) == 1
    assert "share of the free memory" in warnings[0]


def test_a_buffer_that_cannot_be_locked_stays_pageable(cudart: Cudart, warnings: list[str]) -> None:
    cudart.answer = 2
    image = image_of(5000)
    assert not staging.page_lock(image, 1 << 40, CPU)
    image.views[0].fill_(1.0)
    assert len(warnings) == 1
    assert "cudaHostRegister gave error 2" in warnings[0]
    del image
    gc.collect()  # nothing is unregistered that was not registered: KeyError


def test_the_ranks_of_a_node_share_what_its_cgroup_has_left(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\n")
    group = MemoryGroup(tmp_path)
    assert staging.room_to_lock(4, 4000, group) == 200
    assert staging.room_to_lock(4, 400, group) == 100
    (tmp_path / "memory.max").write_text("max\n")
    assert staging.room_to_lock(4, 4000, group) == 1000
    assert staging.room_to_lock(4, 4000, None) == 1000


def test_the_staging_thread_is_on_the_gpu_of_its_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    current: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    stager = staging.Stager(torch.device("cuda", 3))
    stager._thread.submit(lambda: None).result()
    stager.close()
    assert current == [torch.device("cuda", 3)]


def test_pages_are_locked_before_the_first_copy(
    cudart: Cudart, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    stager = staging.Stager(torch.device("cuda", 0))
    image = image_of(5000)
    stager.page_lock(image, 1 << 40)
    locked = stager._thread.submit(lambda: dict(cudart.ranges)).result()
    stager.close()
    assert locked == {image.address: len(image.content)}


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of a world of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def steps_until_locked(run: RunDirectory, group: dist.ProcessGroup) -> list[int]:
    """In which steps of an attempt the buffer of the saves is locked; its last step is saved."""
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    manager = open_manager(run, model, optimizer, group)
    manager.restore()
    saver, locked = manager._saver, []
    saver._unprepared = optimizer  # as on a GPU
    for step in range(1, 5):
        model(torch.ones(4)).sum().backward()
        manager.release_staging()
        if saver._routes._image is not None:
            locked.append(step)
            saver._routes._image = None
        optimizer.step()
    manager.save(TrainState(step=4))
    manager.join()
    saver.close()
    return locked


def test_a_resumed_run_locks_in_its_first_step_and_a_new_one_in_its_second(
    tmp_path: Path, group: dist.ProcessGroup
) -> None:
    run = RunDirectory(tmp_path)
    assert steps_until_locked(run, group) == [2]
    assert steps_until_locked(run, group) == [1]
