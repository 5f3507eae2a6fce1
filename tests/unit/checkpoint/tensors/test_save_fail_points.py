"""Every point at which a fault can be asked for is passed by a save, for the step that it saves."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from saved import open_manager
from torch import nn

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.manager import CheckpointEngine
from kempner.config.resilience import FailPoint, parse_faults
from kempner.run.process.fail_points import fail_point, set_fail_point
from kempner.run.record.run_dir import RunDirectory
from kempner.training.fault_injection import FaultInjector


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[CheckpointEngine]:
    """Of a world of one; with no fail point set before and after."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(3)).sum().backward()
    optimizer.step()
    group = dist.new_group(backend="gloo")
    with closing(open_manager(RunDirectory(tmp_path), model, optimizer, group)) as manager:
        yield manager
    for point in FailPoint:
        set_fail_point(point, None)
    dist.destroy_process_group()


def test_a_save_passes_each_point_once_in_order(manager: CheckpointEngine) -> None:
    passed: list[tuple[str, int | None]] = []

    def note(point: str, step: int | None) -> None:
        passed.append((point, step))

    for point in FailPoint:
        set_fail_point(point, partial(note, point))
    for step in (4, 7):
        manager.save(TrainState(step))
        manager.join()
    assert manager.committed_step == 7
    assert passed == [(point, step) for step in (4, 7) for point in FailPoint]


def test_a_fault_happens_at_its_step_only(manager: CheckpointEngine) -> None:
    faults = parse_faults([f"crash rank 0 at step 5 in {FailPoint.WRITE}"])
    FaultInjector(faults, rank=0, attempt=1).set_fail_points()
    for step, failures in ((4, 0), (5, 1), (6, 0)):
        manager.save(TrainState(step))
        manager.join()
        assert manager.failures.count == failures


def test_points_of_another_rank_or_attempt_stay_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.kill", lambda pid, number: pytest.fail(signal.Signals(number).name))
    faults = parse_faults(["kill rank 0 at step 5 in write", "kill rank 1 at step 5 in stage"])
    FaultInjector(faults, rank=0, attempt=2).set_fail_points()
    FaultInjector(faults, rank=2, attempt=1).set_fail_points()
    for point in FailPoint:
        fail_point(point, 5)
