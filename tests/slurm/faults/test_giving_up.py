"""A run that only a person can mend takes no nodes any more."""

from __future__ import annotations

import pytest
from submitting import Project

pytestmark = pytest.mark.timeout(300)


def test_a_job_that_is_given_up_is_not_requeued_and_the_next_one_ends_at_once(
    project: Project,
) -> None:
    faults = "; ".join(f"crash rank 1 at step 12 attempt {n}" for n in (1, 2))
    options = ("--supervise.max_restarts_without_progress=1", "--checkpoint.interval=1000")
    job = project.train(*options, KEMPNER_FAULTS=faults)
    project.end(job, "FAILED")
    project.assert_states(job, "FAILED")
    assert project.cluster.job(job)["ExitCode"] == "1:0"
    (verdict,) = project.events("gave_up")
    assert (verdict["rank"], verdict["step"], verdict["node"]) == (1, 12, "node2")
    assert verdict["raised"] in project.log(job)
    assert not project.events("requeued")

    follow_up = project.train(*options)
    project.end(follow_up, "FAILED")
    assert project.cluster.job(follow_up)["ExitCode"] == "1:0"
    assert f"{project.run.record.gave_up} says why" in project.log(follow_up)
    assert project.run.attempt() == 2
