"""The world may change between two starts; the samples and the gradient do not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from harness import Run, launch, wait_until

pytestmark = pytest.mark.timeout(300)

PLAIN = "--model.dropout=0.0"  # dropout masks change with the world, by design

GRADIENT_TOLERANCE = 2e-6
"""Largest difference of a gradient entry, as a fraction of the parameter's largest entry: a few
float32 roundings (1.2e-7 each), since only the order of the sums differs between worlds."""


def gradient(run: Run, world: int, out: Path) -> dict[str, torch.Tensor]:
    """The gradient of the run's next step, computed by this many ranks."""
    launch(Path(__file__).with_name("gradient_of_step.py"), world, out, run.config, PLAIN)
    found: dict[str, torch.Tensor] = torch.load(out, weights_only=True)["gradient"]
    return found


def test_two_ranks_then_one_then_three(run: Run, tmp_path: Path) -> None:
    changed_at = []
    for world in (2, 1):
        job = run.supervise(world, PLAIN)
        wait_until(lambda: run.attempt() > 0, "an attempt", job=job)
        run.reach(max(run.steps(), default=0) + 7, job)
        job.signal()
        assert job.wait() == 75, job.output()
        changed_at.append(run.latest())
    one = gradient(run, 1, tmp_path / "one.pt")
    three = gradient(run, 3, tmp_path / "three.pt")
    assert three.keys() == one.keys()
    for name, expected in one.items():
        off = (three[name] - expected).abs().max() / expected.abs().max()
        assert off <= GRADIENT_TOLERANCE, f"{name}: {off}"
    run.complete(3, PLAIN)
    taken = run.samples()
    assert {step: sorted(ids) for step, ids in taken.items()} == {
        step: list(range(8 * (step - 1), 8 * step)) for step in range(1, 41)
    }
    worlds = {
        line["attempt"]: sum(1 for _ in run.record.attempt(line["attempt"]).glob("rank-*.jsonl"))
        for line in run.metrics()
    }
    assert sorted(worlds.values()) == [1, 2, 3]
    assert changed_at[0] < changed_at[1] < 40


def test_a_world_larger_than_the_batch(run: Run, reference: Run) -> None:
    small = ("--train.global_batch_size=2", "--train.max_steps=6", PLAIN)
    reference.complete(1, *small)
    run.complete(3, *small)
    assert run.samples() == reference.samples()
    for step, (*numbers, _) in reference.steps().items():
        assert [*run.steps()[step][:2]] == pytest.approx(numbers, rel=1e-4)
