"""A rank that ignores the stop is killed in time for the job to be put back into the queue."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import Run
from submitting import LONG, Project, assert_like

pytestmark = pytest.mark.timeout(500)


def test_ranks_that_ignore_the_stop_cost_the_job_no_time_limit(
    project: Project, undisturbed: Run, tmp_path: Path, corpus: Path
) -> None:
    """One loops in Python, one waits in native code that holds Python's lock."""
    native = Project.make(project.cluster, tmp_path / "native", corpus)
    train = (*LONG, "--checkpoint.async_save=false")  # what is saved at step 10 is there at step 14
    jobs = [
        (
            side,
            side.train(*train, options=("--time=60",), KEMPNER_FAULTS=f"{kind} rank 1 at step 14"),
        )
        for side, kind in ((project, "hang"), (native, "spin"))
    ]
    for side, job in jobs:
        log = side.run.record.log(1, 1)
        struck = lambda file=log: file.exists() and "injecting fault" in file.read_text()  # noqa: E731
        side.wait_until(job, struck, "the fault")
        side.end_in_minutes(job, 2)
    for side, job in jobs:
        side.wait_until(job, lambda s=side: s.events("handed_back"), "return into the queue", 240)
        side.cluster.wait_for(job, "PENDING", "RUNNING")
        side.end_in_minutes(job, 60)
    for side, job in jobs:
        side.end(job, deadline=240)
        side.assert_states(job, "REQUEUED", "COMPLETED")
        (requeued,), (resumed,) = side.events("requeued"), side.events("resumed")
        assert requeued["step"] == resumed["step"] == 10
        asked = side.events("stop_requested")[-1]
        (measured,) = side.events("handed_back")
        assert asked["time"] + asked["seconds_left"] < requeued["time"]  # not before it was killed
        assert measured["seconds"] < 15
        assert not side.events("suspect")
        assert_like(side.run, undisturbed)
