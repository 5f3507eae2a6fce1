"""Bits that flip in a run are found, named, and leave no trace in what it becomes."""

from __future__ import annotations

import platform

import pytest
from harness import Run

from kempner.checkpoint.compare import open_kempner, pairs

pytestmark = pytest.mark.timeout(600)

STEPS = 12
ASKED = (
    "--train.same_on_any_world=true",
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=3",
    "--integrity.recompute_interval=4",
)
FAULTS = (
    "flip rank 1 by 12 from step 6 in activations",
    "flip rank 2 by 3 at step 11 in weights attempt 2",
)


def test_a_run_whose_bits_flip_ends_as_one_without(run: Run, reference: Run) -> None:
    """What sticks is found at the next check, by a third rank; the memory of a rank at once."""
    reference.complete(3, *ASKED)
    job = run.supervise(3, *ASKED, KEMPNER_FAULTS="; ".join(FAULTS))
    assert job.wait(300) == 0, job.output()
    found = run.events("corruption_found")
    assert [(e["step"], e["ranks"], e["sure"], e["to"]) for e in found] == [
        (8, [1], True, 3),
        (11, [2], True, 6),
    ]
    assert {e["node"] for e in run.events("suspect")} == {platform.node()}
    assert run.steps() == reference.steps()
    last = [open_kempner(each.checkpoints / f"step-{STEPS:08}") for each in (run, reference)]
    assert [pair.name for pair in pairs(*last, on_bytes=lambda _: None) if not pair.equal] == []
    assert [e["step"] for e in reference.events("checkpoints_certified")][-1] == STEPS
