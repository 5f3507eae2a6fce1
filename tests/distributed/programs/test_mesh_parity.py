"""Replicated, sharded and tensor parallel in every way, a step is that of one process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from harness import drills, launch
from mesh_parity import ASKED, Made, built, step
from torch import Tensor
from torch.distributed import HashStore

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.model.spec.mesh import MeshDegrees
from kempner.run.record.run_dir import RunDirectory
from kempner.training.compute.optimizer import build_optimizer

TOLERANCE = 3e-6
"""Largest difference of a gradient or a logit, relative to its tensor's largest element.

Sums over ranks, and over the parts of a row that tensor parallelism makes, are added in another
order: that is a few roundings of float32 (6e-8 each) for each of the few sums on the way, and the
same as for plain sharding. An element that is wrong is off by its own size.
"""

FOUR = ["1x4x1", "4x1x1", "2x2x1", "1x1x4", "1x2x2", "2x1x2"]


@pytest.fixture(scope="module")
def alone() -> Iterator[dict[str, Made]]:
    """What a single process makes of every model."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    made = {}
    for name, asked in ASKED.items():
        model = built(asked, None)
        optimizer = build_optimizer(model, asked.optimizer)
        made[name] = step(model, optimizer, MeshDegrees(), 0, asked)
    yield made
    dist.destroy_process_group()


@pytest.mark.parametrize("meshes", [FOUR, *drills(["1x2x1", "2x1x1", "1x1x2"], ["2x2x2"])])
def test_a_step_is_that_of_one_process(
    meshes: list[str], alone: dict[str, Made], tmp_path: Path
) -> None:
    """And each mesh goes on from the checkpoint of the one before it, with the same bits; twice
    on one mesh a step has the same bits: `mesh_parity.py` makes sure of both. What the last mesh
    has saved the stock reader reads, too.
    """
    replicate, shard, tensor = map(int, meshes[0].split("x"))
    script = Path(__file__).with_name("mesh_parity.py")
    launch(script, replicate * shard * tensor, tmp_path, *meshes, deadline=250)
    saved = torch.load(tmp_path / "made.pt")
    made = {which: Made(**fields) for which, fields in saved.items()}
    assert made.keys() >= {(name, meshes[-1]) for name in ASKED}
    for (name, mesh), found in made.items():
        expected, where = alone[name], f"{name} on {mesh}"
        assert found.loss == pytest.approx(expected.loss, rel=1e-6), where
        assert found.norm == pytest.approx(expected.norm, rel=TOLERANCE), where
        assert difference(found.logits, expected.logits) <= TOLERANCE, where
        assert found.weights.keys() == expected.weights.keys()
        for key, weight in expected.weights.items():
            assert torch.equal(found.weights[key], weight), f"{where}: {key}"
        for key, gradient in expected.gradients.items():
            assert difference(found.gradients[key], gradient) <= TOLERANCE, f"{where}: {key}"
    for name in ASKED:
        committed = CheckpointFolder(RunDirectory(tmp_path / name).checkpoints)
        expected_state = made[name, meshes[-1]].updated
        loaded = {key: torch.empty_like(tensor) for key, tensor in expected_state.items()}
        dcp.load(loaded, checkpoint_id=committed.step(max(committed.committed())), no_dist=True)
        for key, tensor in expected_state.items():
            assert torch.equal(loaded[key], tensor), f"{key} for the stock reader"


def difference(found: Tensor, expected: Tensor) -> float:
    """The largest, relative to the largest element."""
    assert found.shape == expected.shape
    return ((found - expected).abs().max() / expected.abs().max()).item()
