"""Saves and loads over several ranks without the training around them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import warm
from harness import KEMPNER, drills, launch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

HERE = Path(__file__).parent


@pytest.mark.parametrize("world", [3, *drills(2)])
def test_a_failure_on_one_rank_is_told_to_all_and_the_next_save_succeeds(
    tmp_path: Path, world: int
) -> None:
    launch(HERE / "failing_saves.py", world, tmp_path / "run")


@pytest.mark.parametrize("schedules", [2, *drills(36)])
@pytest.mark.timeout(900)
def test_ranks_that_are_late_never_part(tmp_path: Path, schedules: int) -> None:
    """More schedules, in virtual time, are in tests/drills/runs/test_rank_order.py."""
    launch(HERE / "late_ranks.py", 2, tmp_path / "runs", schedules, deadline=800.0)


def test_any_world_loads_what_any_world_saved_bit_for_bit(tmp_path: Path) -> None:
    launch(HERE / "reshard.py", 3, tmp_path)


def test_a_large_world_s_index_loads_reshards_verifies_and_is_exported(tmp_path: Path) -> None:
    launch(HERE / "reshard.py", 2, tmp_path, 1)
    stock, ours = tmp_path / "1" / "checkpoints", tmp_path / "2" / "checkpoints"
    assert [(path / "latest" / ".metadata").exists() for path in (stock, ours)] == [True, False]
    assert all((path / "latest" / "index.json").exists() for path in (stock, ours))
    checkpoint = [*KEMPNER, "checkpoint"]
    assert warm.complete(*checkpoint, "verify", ours)[0] == 0
    for format_, out in (("dcp", tmp_path / "plain"), ("torch", tmp_path / "file")):
        command = [*checkpoint, "export", ours, f"--format={format_}", f"--out={out}"]
        assert warm.complete(*command)[0] == 0
    expected = torch.load(tmp_path / "file", weights_only=True)["model"]
    loaded = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in expected.items()}
    dcp.load(loaded, checkpoint_id=tmp_path / "plain", no_dist=True)
    for name, tensor in expected.items():
        assert tensor.any()
        assert torch.equal(loaded[f"model.{name}"], tensor), name


def test_states_that_no_checkpoint_holds_are_refused_on_all_ranks_alike(tmp_path: Path) -> None:
    launch(HERE / "unheld_states.py", 4, tmp_path)
