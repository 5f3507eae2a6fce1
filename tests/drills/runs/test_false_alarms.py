"""A healthy run whose steps vary fivefold, with long evaluations and slow saves, is left alone."""

from __future__ import annotations

import pytest
from drilling import ALL, note
from harness import Run

pytestmark = pytest.mark.timeout(900)

STEPS = 1000 if ALL else 150


def test_no_hang_is_seen_in_a_healthy_run(run: Run) -> None:
    slow = [f"slow rank {step % 2} by 5 at step {step}" for step in range(20, STEPS, 13)]
    job = run.supervise(
        2,
        f"--train.max_steps={STEPS}",
        "--resilience.hang_timeout_min=5.0",  # the default would hide what this run could show
        "--eval.interval=50",
        f'--eval.dataset_path="{run.data}"',
        "--eval.max_batches=60",
        "--checkpoint.interval=25",
        "--checkpoint.async_save=false",
        KEMPNER_FAULTS=";".join(slow),
    )
    assert job.wait(850) == 0, job.output()
    assert run.events("hang") == []
    (kept,) = run.events("phase_durations")
    assert {"step", "save"} <= set(kept["phases"])
    note("false-alarms", steps=STEPS, phases=kept["phases"])
