"""When ranks whose supervisor is gone put the job back into the queue."""

from __future__ import annotations

import pytest

from kempner.cluster.slurm.job import parse_job
from kempner.training.rank_link.orphan_requeue import decide_orphan_requeue


@pytest.mark.parametrize(
    ("state", "may_requeue", "restarts", "requeue", "words"),
    [
        ("RUNNING", "1", "2", True, "requeueing the job"),
        ("SIGNALING", "1", "2", True, "requeueing the job"),
        ("RUNNING", "0", "2", False, "--no-requeue"),
        ("COMPLETING", "1", "2", False, "is COMPLETING"),
        ("CANCELLED", "1", "2", False, "is CANCELLED"),
        ("PENDING", "1", "3", False, "is PENDING"),
        ("RUNNING", "1", "3", False, "started again in the meantime"),
    ],
)
def test_only_a_running_job_is_requeued(
    state: str, may_requeue: str, restarts: str, requeue: bool, words: str
) -> None:
    fields = {"JobId": "7", "JobState": state, "Requeue": may_requeue, "Restarts": restarts}
    verdict = decide_orphan_requeue(parse_job(fields), restarts=2)
    assert verdict.requeue is requeue
    assert words in verdict.reason
