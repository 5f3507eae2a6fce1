"""A stop that leaves too little time: the last commit stays as it is, and the run goes on there."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from harness import Run

pytestmark = pytest.mark.timeout(200)


def slow_down(run: Run) -> None:
    """Let the ledger say that saves took a hundred seconds, as on a storage that is slow."""
    lines = [json.loads(line) for line in run.record.ledger.read_text().splitlines()]
    for event in lines:
        if event["event"] == "checkpoint_committed":
            event["write_seconds"] = 100.0
    run.record.ledger.write_text("".join(json.dumps(event) + "\n" for event in lines))


@pytest.mark.drill
@pytest.mark.parametrize("world", [1, 2])
def test_a_restarted_run_knows_that_a_save_would_not_fit(
    run: Run, undisturbed: Callable[..., Run], world: int
) -> None:
    keep = "--checkpoint.interval=1000"
    job = run.supervise(world, keep)
    run.reach(6, job)
    job.signal()
    assert job.wait() == 75, job.output()
    kept = run.latest()
    slow_down(run)

    job = run.supervise(world, keep, "--supervise.stop_grace=50")
    run.reach(kept + 3, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert run.latest() == kept
    lost = max(run.steps()) - kept
    assert f"the last {lost} steps are lost, because a save takes 100" in job.output()
    assert "a warning of 103 s would have been enough" in job.output()
    assert run.events("stopped")[-1]["lost_steps"] == lost

    job = run.supervise(world, keep, "--supervise.stop_grace=200")
    run.reach(kept + lost + 1, job)
    job.signal()
    assert job.wait() == 75, job.output()
    assert run.latest() == max(run.steps()) > kept

    run.complete(world, keep)
    assert run.steps() == undisturbed(world).steps()
