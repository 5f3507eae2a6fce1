"""Ranks that hang in whatever way are noticed, looked at and named, and the run goes on."""

from __future__ import annotations

import pytest
from harness import Run

from kempner.config.faults import parse_faults

OPTIONS = ("--train.max_steps=240", "--checkpoint.interval=20", "--train.global_batch_size=6")

FAULTS = {
    "hang rank 1 at step 205": "_hang",
    "strand rank 2 at step 215 attempt 2": "recv",
    "hang rank 0 at step 220 in save attempt 3": "_hang",
    "stop rank 2 at step 235 attempt 4": None,
}
"""Each with the function in which the stacks find the rank, if it can still write them."""


@pytest.mark.timeout(400)
def test_hangs_are_noticed_named_and_healed(run: Run, reference: Run) -> None:
    job = run.supervise(3, *OPTIONS, "--resilience.hang_floor=8.0", KEMPNER_FAULTS=";".join(FAULTS))
    assert job.wait(300) == 0, job.output()
    hangs = {hang["attempt"]: hang for hang in run.events("hang")}
    for fault, function in zip(parse_faults(FAULTS), FAULTS.values(), strict=True):
        hang = hangs.pop(fault.attempt)
        assert hang["laggard"] == fault.rank, hang
        stacks = {r: run.record.stacks(fault.attempt, r) for r in range(3)}
        stopped = function is None
        assert {r for r, file in stacks.items() if file.exists()} == {0, 1, 2} - (
            {fault.rank} if stopped else set()
        )
        if stopped:
            assert any("State: T (stopped)" in line for line in hang["processes"])
        else:
            assert f"in {function}\n" in stacks[fault.rank].read_text()
        assert set(hang["waiting"].pop("nothing", ())) <= {fault.rank}
    assert hangs == {}  # and nothing else was taken for one
    ends = {e["attempt"]: e["code"] for e in run.events("attempt_ended")}
    assert ends == {1: 77, 2: 77, 3: 77, 4: 77, 5: 0}
    reference.complete(3, *OPTIONS)
    assert run.steps() == reference.steps()
