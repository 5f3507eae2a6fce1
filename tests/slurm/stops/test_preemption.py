"""Preempted by real jobs of higher priority, in every way that Slurm has, a run loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Run
from submitting import LONG, Project, assert_like

pytestmark = pytest.mark.timeout(400)

WAYS: list[tuple[dict[str, Any], str]] = [
    ({"grace": 20}, "REQUEUED"),  # by us, as soon as all is committed
    ({"grace": 0}, "PREEMPTED"),  # Slurm is faster
    ({"grace": 20, "send_user_signal": True}, "REQUEUED"),
    ({"grace": 20, "preempt": "qos"}, "REQUEUED"),
]
"""Changes to the cluster, and what accounting then says of the preempted launch."""


def test_every_kind_of_preemption_in_a_row_costs_nothing(
    project: Project, undisturbed: Run
) -> None:
    project.slow()
    job = project.train(*LONG)
    for number, (changes, _) in enumerate(WAYS, start=1):
        project.attempt(job, number)
        project.reach(job, max(project.run.committed(), default=0) + 3)
        project.cluster.configure(**{"send_user_signal": False, **changes})
        project.cluster.wait_for(project.cluster.preempt(job, seconds=1), "COMPLETED")
    project.attempt(job, len(WAYS) + 1)
    project.hurry()
    project.end(job)
    project.assert_states(job, *(state for _, state in WAYS), "COMPLETED")
    assert all(event["lost_steps"] == 0 for event in project.events("stopped"))
    said = [event["reason"] for event in project.events("requeued")]
    assert len(said) == [state for _, state in WAYS].count("REQUEUED")
    assert all("preempted by a job of higher priority" in reason for reason in said)
    assert "Slurm requeues the job itself" in project.log(job)
    assert f"Restart cnt: {len(WAYS)}" in project.log(job)
    assert_like(project.run, undisturbed)
