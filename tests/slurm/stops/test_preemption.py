"""Preempted by real jobs of higher priority, in every way that Slurm has, a run loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from harness import Run, assert_named, drills
from submitting import LONG, Project, assert_like

from kempner.run.process.exit_codes import StopReason

pytestmark = pytest.mark.timeout(400)

Ways = list[tuple[dict[str, Any], str, StopReason]]
"""Changes to the cluster, what accounting then says of the preempted launch, and what we do."""

WAYS: Ways = [
    ({"grace": 20}, "REQUEUED", StopReason.PREEMPTION),  # by us, as soon as all is committed
    ({"grace": 0}, "PREEMPTED", StopReason.REQUEUE),  # Slurm is faster, and does not say why
    ({"grace": 20, "preempt": "qos"}, "REQUEUED", StopReason.PREEMPTION),
]
SEND_SIGNAL = {"SlurmctldParameters": "preempt_send_user_signal"}
# The batch script is then signalled as before a time limit, which test_limits.py has.
SIGNALLED: Ways = [({"grace": 20, "extra": SEND_SIGNAL}, "REQUEUED", StopReason.PREEMPTION)]


@pytest.mark.every_slurm
@pytest.mark.parametrize(
    "ways", [WAYS, *drills(WAYS[:2] + SIGNALLED + WAYS[2:])], ids=["most", "all"]
)
def test_every_kind_of_preemption_in_a_row_costs_nothing(
    project: Project, undisturbed: Run, ways: Ways
) -> None:
    project.slow()
    job = project.train(*LONG)
    for number, (changes, _, _) in enumerate(ways, start=1):
        project.attempt(job, number)
        project.reach(job, max(project.run.committed(), default=0) + 3)
        project.cluster.configure(**{"extra": {}, **changes})
        project.cluster.wait_for(project.cluster.preempt(job, seconds=1), "COMPLETED")
    project.attempt(job, len(ways) + 1)
    project.hurry()
    project.end(job)
    # 24.11 starts a job once more that came back from the grace time of a quality of service.
    again = ["PREEMPTED"] if project.cluster.version == "24.11" else []
    project.assert_states(job, *(state for _, state, _ in ways), *again, "COMPLETED")
    assert all(event["lost_steps"] == 0 for event in project.events("stopped"))
    said = [event["reason"] for event in project.events("requeued")]
    assert len(said) == [state for _, state, _ in ways].count("REQUEUED")
    assert all("preempted by a job of higher priority" in reason for reason in said)
    assert "Slurm requeues the job itself" in project.log(job)
    assert f"Restart cnt: {len(ways)}" in project.log(job)
    for number, (_, _, reason) in enumerate(ways, start=1):
        assert_named(project.run.record, reason, number, 2, project.log(job))
    assert_like(project.run, undisturbed)
