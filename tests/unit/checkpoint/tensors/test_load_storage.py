"""A load from storage that fails for a moment: every bit comes, and nothing is called damaged."""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import wait_until
from patience import scaled
from saved import commit_state, open_manager, small_state
from torch import nn

from kempner.checkpoint.format.manifest import TrainState, read
from kempner.checkpoint.format.names import CheckpointFolder
from kempner.checkpoint.io.verify import verify
from kempner.checkpoint.tensors.load import fill, open_contents
from kempner.run.process.retry import StorageUnavailableError, StorageWaits
from kempner.run.record.run_dir import RunDirectory


def load(checkpoint: Path) -> dict[str, torch.Tensor]:
    manifest = read(checkpoint, worked=True)
    table = {key: torch.zeros_like(tensor) for key, tensor in small_state().items()}
    fill(table, checkpoint, manifest, open_contents(checkpoint, manifest))
    return table


def assert_equal(table: dict[str, torch.Tensor]) -> None:
    for key, tensor in small_state().items():
        assert torch.equal(table[key], tensor), key


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize("code", [errno.EIO, errno.ESTALE, errno.EMFILE])
def test_blocks_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int) -> None:
    checkpoint = commit_state(RunDirectory(tmp_path), small_state(), step=5, world=2)
    whole, calls = os.preadv, list[int]()

    def preadv(*arguments: Any) -> int:
        calls.append(0)
        if len(calls) % 2:
            raise OSError(code, os.strerror(code))
        return whole(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    assert_equal(load(checkpoint))
    assert len(calls) > 1


def test_a_folder_that_is_away_is_waited_for(tmp_path: Path, patient: StorageWaits) -> None:
    checkpoint = commit_state(RunDirectory(tmp_path / "run"), small_state(), step=5)
    (tmp_path / "run").rename(tmp_path / "away")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(load, checkpoint)
        wait_until(lambda: patient.waiting_for, "it to wait")
        (tmp_path / "away").rename(tmp_path / "run")
        assert_equal(loading.result(scaled(60)))


def test_an_error_number_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint = commit_state(RunDirectory(tmp_path), small_state(), step=5)
    monkeypatch.setattr(Path, "read_bytes", fail)
    with pytest.raises(StorageUnavailableError, match="Input/output error"):
        verify(checkpoint)


def fail(*_: object) -> bytes:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def test_many_files_are_never_open_at_once(tmp_path: Path) -> None:
    checkpoint = commit_state(RunDirectory(tmp_path), small_state(), step=5, world=40)
    _, hard = before = resource.getrlimit(resource.RLIMIT_NOFILE)
    in_use = max(int(entry.name) for entry in Path("/proc/self/fd").iterdir())
    resource.setrlimit(resource.RLIMIT_NOFILE, (in_use + 20, hard))
    try:
        table = load(checkpoint)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert_equal(table)


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of a world of one."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield dist.new_group(backend="gloo")
    dist.destroy_process_group()


def test_no_checkpoint_is_set_aside_for_it(
    tmp_path: Path,
    group: dist.ProcessGroup,
    patient: StorageWaits,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fault outlasts the patience; afterwards the newest checkpoint is loaded."""
    run, model = RunDirectory(tmp_path / "run"), nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    with closing(open_manager(run, model, optimizer, group)) as manager:
        for step in (4, 7):
            manager.save(TrainState(step))
            manager.join()
    patient.configure(0.05)
    with closing(open_manager(run, model, optimizer, group)) as manager:
        with monkeypatch.context() as patch:
            patch.setattr(os, "preadv", fail)
            with pytest.raises(StorageUnavailableError, match="Input/output error"):
                manager.restore()
        assert CheckpointFolder(run.checkpoints).committed() == [4, 7]
        restored = manager.restore()
    assert restored is not None
    assert restored.step == 7
