"""When ranks whose supervisor is gone put the job back into the queue."""

from __future__ import annotations

import pytest

from kempner.cluster.job import parse_job
from kempner.training.orphan import judge


@pytest.mark.parametrize(
    ("state", "may_requeue", "requeue", "words"),
    [
        ("RUNNING", "1", True, "goes back into the queue"),
        ("SIGNALING", "1", True, "goes back into the queue"),
        ("RUNNING", "0", False, "--no-requeue"),
        ("COMPLETING", "1", False, "is COMPLETING"),
        ("CANCELLED", "1", False, "is CANCELLED"),
        ("PENDING", "1", False, "is PENDING"),
    ],
)
def test_only_a_running_job_is_requeued(
    state: str, may_requeue: str, requeue: bool, words: str
) -> None:
    verdict = judge(parse_job({"JobId": "7", "JobState": state, "Requeue": may_requeue}))
    assert verdict.requeue is requeue
    assert words in verdict.reason
