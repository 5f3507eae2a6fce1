"""A rank without a supervisor: Ctrl-C is noticed at once, and a second one need not wait."""

from __future__ import annotations

import signal

import pytest
from harness import Run, wait_until

pytestmark = pytest.mark.timeout(300)

GIANT = "--train.global_batch_size=100000000"


@pytest.mark.cold("Ctrl-C at a rank, as people do it")
def test_ctrl_c_in_a_giant_batch(run: Run) -> None:
    """No step of it ever ends: one Ctrl-C is answered at once, and obeyed while data is awaited."""
    job = run.train(GIANT)
    run.ready_pid(1, 0, job)
    job.signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping after this step" in job.output(), "an answer", job=job)
    assert job.wait(120) == 75, job.output()
    assert run.events("stopped")[0]["step"] == 0


def test_a_second_ctrl_c_in_a_step_that_does_not_end(run: Run) -> None:
    job = run.train("--train.max_steps=100000", KEMPNER_FAULTS="hang rank 0 at step 4")
    run.reach(3, job)
    wait_until(lambda: "injecting" in job.output(), "the fault", job=job)
    job.signal(signal.SIGINT)
    wait_until(lambda: "SIGINT: stopping after this step" in job.output(), "an answer", job=job)
    job.signal(signal.SIGINT)
    assert job.wait(60) == 130, job.output()
    assert "exited at once on the second Ctrl-C; the last commit is intact" in job.output()
