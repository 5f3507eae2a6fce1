"""Ranks that hang in whatever way are noticed, looked at and named, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from harness import Run

from kempner.config.faults import parse_faults

pytestmark = pytest.mark.timeout(400)

OPTIONS = ("--train.max_steps=240", "--checkpoint.interval=20", "--train.global_batch_size=6")

IN_PYTHON_AND_STOPPED = {
    "hang rank 1 at step 205 attempt 1": "_hang",
    "stop rank 2 at step 235 attempt 2": None,
}
"""Each with the function in which the stacks find the rank, if it can still write them."""

IN_A_SAVE_AND_IN_A_COLLECTIVE = {
    "hang rank 0 at step 220 in save attempt 1": "_hang",
    "strand rank 2 at step 235 attempt 2": "recv",
}


def heal(run: Run, faults: Mapping[str, str | None]) -> None:
    """Have one rank hang in each attempt but the last; each time it is named, by what is found."""
    planned = ";".join(faults)
    job = run.supervise(3, *OPTIONS, "--resilience.hang_floor=8.0", KEMPNER_FAULTS=planned)
    assert job.wait(300) == 0, job.output()
    hangs = {hang["attempt"]: hang for hang in run.events("hang")}
    for fault in parse_faults(faults):
        hang, function = hangs.pop(fault.attempt), faults[fault.text]
        assert hang["laggard"] == fault.rank, hang
        assert set(hang["waiting"].pop("nothing", ())) <= {fault.rank}
        stacks = {rank: run.record.stacks(fault.attempt, rank) for rank in range(3)}
        written = {rank for rank, file in stacks.items() if file.exists()}
        if function is None:
            assert written == {0, 1, 2} - {fault.rank}
            assert any("State: T (stopped)" in line for line in hang["processes"])
        else:
            assert written == {0, 1, 2}
            assert f"in {function}\n" in stacks[fault.rank].read_text()
    assert hangs == {}  # and nothing else was taken for one
    ends = [ended["code"] for ended in run.events("attempt_ended")]
    assert ends == [77] * len(faults) + [0]


def test_hangs_are_noticed_named_and_healed(run: Run, reference: Run) -> None:
    heal(run, IN_PYTHON_AND_STOPPED)
    reference.complete(3, *OPTIONS)
    assert run.steps() == reference.steps()


@pytest.mark.drill
def test_hangs_inside_a_save_and_a_collective_are_healed(run: Run, reference: Run) -> None:
    """Of `make test` the one above is a part: the same, with ranks that hang elsewhere."""
    heal(run, IN_A_SAVE_AND_IN_A_COLLECTIVE)
    reference.complete(3, *OPTIONS)
    assert run.steps() == reference.steps()
