"""After storage has failed, time decides about a restart, not the number of failures."""

from __future__ import annotations

import pytest

from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.history import RunHistory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import (
    LONGEST_PAUSE,
    StorageOutage,
    decide_storage_restart,
    failures,
    find_outage,
)

STORAGE = Decision(ExitCode.STORAGE_UNAVAILABLE, "rank 1 exited with code 69", 1)


def failed(at: float, code: int = 69, committed: int | None = 20) -> dict[str, object]:
    fields = {"step": 20, "committed": committed, "raised": "", "node": "", "code": code}
    return {"event": "attempt_failed", "time": at, "attempt": 1, **fields}


GIVEN_UP = {"event": "gave_up", "time": 5.0, "attempt": 1, "code": 69, "reason": "", "see": [],
            "advice": ""}  # fmt: skip


@pytest.mark.parametrize(
    ("lines", "outage"),
    [
        ([], StorageOutage(0, 9.0)),
        ([failed(1.0), failed(7.0)], StorageOutage(2, 4.0)),
        ([failed(1.0, committed=10), failed(7.0)], StorageOutage(1, 9.0)),
        ([failed(1.0), failed(3.0, code=1), failed(7.0)], StorageOutage(1, 9.0)),
        ([failed(1.0), GIVEN_UP, failed(7.0)], StorageOutage(1, 9.0)),
        # The clock of the day was set by an hour.
        ([failed(1.0), failed(3607.0)], StorageOutage(2, 4.0)),
    ],
)
def test_an_outage_begins_after_the_last_commit(
    lines: list[dict[str, object]], outage: StorageOutage
) -> None:
    before = StorageOutage(1, 4.0)
    assert find_outage(RunHistory(lines), committed=20, before=before, now=9.0) == outage


def test_it_is_tried_again_with_pauses_until_the_patience_is_over() -> None:
    decisions = [
        decide_storage_restart(STORAGE, StorageOutage(n, 0.0), 9.0, 60.0) for n in range(1, 9)
    ]
    assert all(decision.again for decision in decisions)
    assert [decision.pause for decision in decisions][:3] == [5.0, 10.0, 20.0]
    assert decisions[-1].pause == LONGEST_PAUSE
    over = decide_storage_restart(STORAGE, StorageOutage(3, 0.0), 60.0, 60.0)
    assert not over.again
    assert over.reason == "rank 1 exited with code 69. 3 attempts in 60 s found it no better"


def test_failures_of_storage_are_no_proof_against_the_program() -> None:
    history = RunHistory([failed(1.0), failed(2.0, code=1), failed(3.0)])
    assert [failure.code for failure in failures(history)] == [1]
