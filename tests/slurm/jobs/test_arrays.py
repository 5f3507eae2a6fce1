"""The elements of a job array are runs of their own, and what happens to one leaves the others."""

from __future__ import annotations

from dataclasses import replace

import pytest
from harness import wait_until
from submitting import Project

pytestmark = pytest.mark.timeout(300)


@pytest.mark.every_slurm
def test_the_element_that_carries_the_arrays_id_is_warned_alone(project: Project) -> None:
    long = "--train.max_steps=200"
    array = project.train(long, nodes=1, options=("--array=1-3", "--output=logs/%A_%a.out"))
    first, second, last = (replace(project.run, name=f"run-{k}") for k in (1, 2, 3))
    wait_until(lambda: any(s >= 5 for s in last.steps()), "step 5 of the last element")
    assert project.cluster.job(f"{array}_3")["JobId"] == array
    project.warn(f"{array}_3")
    replace(project, run=last).attempt(f"{array}_3", 2)
    for element in (1, 2, 3):
        project.cluster.wait_for(f"{array}_{element}", "COMPLETED", deadline=120)
        restarts = "1" if element == 3 else "0"
        assert project.cluster.job(f"{array}_{element}")["Restarts"] == restarts
    assert [run.attempt() for run in (first, second, last)] == [1, 1, 2]
    (requeued,), (resumed,) = last.events("requeued"), last.events("resumed")
    assert requeued["job"] == f"{array}_3"
    assert requeued["step"] == resumed["step"]
    assert last.steps() == second.steps() == first.steps()
    assert len(first.steps()) == 200
