"""With `train.same_on_any_world` results are the same bits on any number of ranks."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch
from harness import Run, drills, launch

from kempner.checkpoint.compare import open_kempner, pairs

pytestmark = pytest.mark.timeout(600)

PROGRAM = Path(__file__).parents[1] / "programs/any_world.py"
WORLDS = ["1x1", "1x2 2x1", "1x3 3x1"]
LARGER = ["1x1", "1x4 2x2 4x1", "1x5", "1x8 2x4"]


def ranks(meshes: str) -> int:
    replicas, shards = map(int, meshes.split()[0].split("x"))
    return replicas * shards


@pytest.mark.parametrize(
    ("models", "worlds"), [("eager", WORLDS), *drills(("eager", LARGER), ("compiled", WORLDS))]
)
def test_losses_norms_weights_and_moments_are_the_same_bits(
    models: str, worlds: list[str], tmp_path: Path
) -> None:
    """Replicated, sharded, and both; also where no tree's half has whole ranks, or a rank has no
    slot. With dropout, documents, chunks of the loss, blocks that compute again, and an adapter."""
    found: dict[tuple[str, str], object] = {}
    for meshes in worlds:
        out = tmp_path / f"{meshes[:3]}.pt"
        launch(PROGRAM, ranks(meshes), out, models, *meshes.split(), deadline=500)
        found |= torch.load(out)
    assert len(found) >= len(worlds)
    for (name, mesh), bits in found.items():
        assert bits == found[name, "1x1"], f"{name} on {mesh}"


STEPS = 30
PURE = (
    "--train.same_on_any_world=true",
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=5",
    "--train.global_batch_size=10",
    "--eval.interval=10",
    "--eval.max_batches=2",
)


def test_stops_a_kill_and_other_worlds_change_no_bit(run: Run, reference: Run) -> None:
    """Five slots; from one rank to three, of which one is killed, to two replicas."""
    asked = (*PURE, f"--eval.dataset_path={run.data}")
    reference.complete(2, *asked)
    job = run.supervise(1, *asked)
    run.reach(6, job)
    job.signal()
    assert job.wait() == 75, job.output()
    job = run.supervise(3, *asked)
    run.reach(12, job)
    os.kill(run.ready_pid(run.attempt(), 1, job), signal.SIGKILL)
    run.reach(20, job)
    job.signal()
    assert job.wait() == 75, job.output()
    run.complete(2, *asked, "--parallelism.data_parallel_replicate_degree=2")
    assert run.steps() == reference.steps()
    assert len(run.steps()) == STEPS
    assert run.taken() == list(range(10 * STEPS))
    last = [open_kempner(each.checkpoints / f"step-{STEPS:08}") for each in (run, reference)]
    assert [pair.name for pair in pairs(*last, on_bytes=lambda _: None) if not pair.equal] == []
    ours, theirs = (
        {e["step"]: e["loss"] for e in each.events("evaluated")} for each in (run, reference)
    )
    assert ours == theirs
