"""Ranks that hang in whatever way are noticed, looked at and named, and the run goes on."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from harness import Run
from patience import slowed

from kempner.config.resilience import parse_faults

pytestmark = pytest.mark.timeout(400)

OPTIONS = ("--train.max_steps=240", "--checkpoint.interval=20", "--train.global_batch_size=6")
SOON = (
    f"--resilience.hang_timeout_min={slowed(8.0)}",
    f"--resilience.hang_timeout_max_of.load={slowed(15.0)}",
)

IN_PYTHON_AND_STOPPED = {
    "hang rank 1 at step 205 attempt 1": "_hang",
    "stop rank 2 at step 235 attempt 2": None,
}
"""Each with the function in which the stacks find the rank, if it can still write them."""

IN_A_SAVE_AND_IN_A_COLLECTIVE = {
    "hang rank 0 at step 220 in save attempt 1": "_hang",
    "strand rank 2 at step 235 attempt 2": "recv",
}

IN_AN_EVALUATION_AND_IN_LOADS = {
    "hang rank 1 at step 210 in eval attempt 1": "_hang",
    "hang rank 2 in load attempt 2": "_hang",
    "hang rank 0 in load attempt 3": "_hang",
}


def heal(run: Run, faults: Mapping[str, str | None], *options: str) -> None:
    """Have one rank hang in each attempt but the last; each time it is named, by what is found."""
    job = run.supervise(3, *OPTIONS, *SOON, *options, KEMPNER_FAULTS=";".join(faults))
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


def test_hangs_are_noticed_named_and_healed(run: Run) -> None:
    heal(run, IN_PYTHON_AND_STOPPED)


@pytest.mark.drill
@pytest.mark.parametrize(
    "faults", [IN_A_SAVE_AND_IN_A_COLLECTIVE, IN_AN_EVALUATION_AND_IN_LOADS], ids=["save", "load"]
)
def test_hangs_elsewhere_are_healed(
    run: Run, reference: Run, faults: Mapping[str, str | None]
) -> None:
    """Of `make check` the one above is a part: here ranks hang elsewhere, and the losses are those
    of a run in which none did.
    """
    evaluation = ("--eval.interval=30", f'--eval.dataset_path="{run.data}"', "--eval.max_batches=2")
    heal(run, faults, *evaluation)
    reference.complete(3, *OPTIONS)
    assert run.steps() == reference.steps()


def test_a_collective_fails_after_the_time_that_is_configured(run: Run) -> None:
    """Long before the supervisor takes that for a hang. All ranks are started again."""
    patience = ("--resilience.hang_timeout_min=300", "--resilience.hang_timeout_max=300")
    job = run.supervise(
        2, "--distributed.timeout=4", *patience, KEMPNER_FAULTS="stop rank 1 at step 15 attempt 1"
    )
    assert job.wait() == 0, job.output()
    failed, completed = run.events("attempt_ended")
    assert failed["exits"] == {"0": 76, "1": -9}
    assert completed["code"] == 0
    assert "Timed out waiting 4000ms" in job.output()
    assert not run.events("hang")
