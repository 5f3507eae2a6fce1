"""A rank that is killed before it has called its supervisor: srun tells of it.

`make check` has one that no message reports, on the supervisor's own clock, in
tests/unit/supervisor/daemon/test_attempt.py.
"""

from __future__ import annotations

import signal

import pytest
from harness import Run, wait_until
from submitting import LONG, Project, assert_like

pytestmark = [pytest.mark.timeout(400), pytest.mark.drill]


def test_a_rank_that_dies_before_it_joins_is_named(project: Project, undisturbed: Run) -> None:
    job = project.train(*LONG)
    checked = project.run.record.supervisor_log(1)
    project.wait_until(
        job, lambda: checked.exists() and '"health check"' in checked.read_text(), "the check"
    )
    node = project.cluster.machines["node2"]
    wait_until(lambda: "rank 1" in node.processes().values(), "the rank's process", interval=0.01)
    project.signal_ranks("node2", signal.SIGKILL)
    project.end(job, deadline=300)
    failed, completed = project.events("attempt_ended")
    assert (failed["culprit"], completed["code"]) == (1, 0)
    assert failed["reason"] == "rank 1 was killed by SIGKILL"
    assert_like(project.run, undisturbed)
