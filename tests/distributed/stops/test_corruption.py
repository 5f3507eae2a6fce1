"""Bits that flip in a run are found, named, and leave no trace in what it becomes."""

from __future__ import annotations

import platform
from collections.abc import Callable

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
REPLICAS = "--parallelism.data_parallel_replicate_degree=2"


@pytest.mark.parametrize(
    ("world", "options", "faults", "liars"),
    [
        (
            3,
            (),
            "flip rank 1 by 12 from step 6 in activations;"
            "flip rank 2 by 3 at step 11 in weights attempt 2",
            (1, 2),
        ),
        (
            4,
            (REPLICAS,),
            "flip rank 3 by 12 at step 8 in gradients;"
            "flip rank 1 by 3 from step 11 in weights attempt 2",
            (3, 1),
        ),
        (
            1,
            (),
            "flip rank 0 by 12 at step 8 in gradients;"
            "flip rank 0 by 3 from step 11 in weights attempt 2",
            (0, 0),
        ),
    ],
    ids=["shards", "replicas", "alone"],
)
def test_a_run_whose_bits_flip_ends_as_one_without(
    run: Run,
    undisturbed: Callable[..., Run],
    world: int,
    options: tuple[str, ...],
    faults: str,
    liars: tuple[int, int],
) -> None:
    """What is computed wrong is found at the check, by a third rank; the memory of a rank at
    once."""
    reference = undisturbed(3, *ASKED)
    job = run.supervise(world, *ASKED, *options, KEMPNER_FAULTS=faults)
    assert job.wait(300) == 0, job.output()
    found = run.events("corruption_found")
    assert [(e["step"], e["ranks"], e["sure"], e["to"]) for e in found] == [
        (8, [liars[0]], True, 3),
        (11, [liars[1]], True, 6),
    ]
    assert {e["node"] for e in run.events("suspect")} == {platform.node()}
    assert run.steps() == reference.steps()
    last = [open_kempner(each.checkpoints / f"step-{STEPS:08}") for each in (run, reference)]
    assert [pair.name for pair in pairs(*last, on_bytes=lambda _: None) if not pair.equal] == []
    assert [e["step"] for e in reference.events("checkpoints_certified")][-1] == STEPS
