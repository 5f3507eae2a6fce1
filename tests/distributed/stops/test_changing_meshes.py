"""Replicas and tensor groups under the supervisor: stopped, resumed, and moved to another mesh."""

from __future__ import annotations

import pytest
from harness import Run

pytestmark = pytest.mark.timeout(300)

STEPS, LATER = 24, 32
MODEL = ("--model.n_kv_heads=2", "--model.vocab_multiple=2")
MESH = (
    "--parallelism.data_parallel_replicate_degree=2",
    "--parallelism.tensor_parallel_degree=2",
)


def test_a_stop_on_a_mesh_changes_nothing_and_another_mesh_goes_on(
    run: Run, reference: Run
) -> None:
    """With dropout, which each rank draws for its own part of a sequence, and an evaluation."""
    sets = f"--eval.sets={{again = '{run.data}'}}"
    held_out = (f"--eval.dataset_path={run.data}", "--eval.interval=8", "--eval.max_batches=2")
    until = (*MODEL, *held_out, sets, f"--train.max_steps={STEPS}")
    reference.complete(4, *until, *MESH)
    job = run.supervise(4, *until, *MESH)
    run.reach(6, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert 6 <= run.latest() < STEPS
    run.complete(4, *until, *MESH)
    assert run.steps() == reference.steps()
    assert run.weights() == reference.weights()
    told = [(e["loss"], e["sets"]) for e in run.events("evaluated")]
    assert told == [(e["loss"], e["sets"]) for e in reference.events("evaluated")]
    assert all(sets == {"again": loss} for loss, sets in told)

    run.complete(2, *MODEL, f"--train.max_steps={LATER}")
    assert list(run.steps()) == list(range(1, LATER + 1))
    assert run.taken() == list(range(8 * LATER))
    losses = [loss for loss, *_ in run.steps().values()]
    assert max(losses[STEPS:]) < min(losses[:4]), "it did not go on from what was trained"
