"""The report of a real run tells what was done to it, by the clocks of those who did it."""

from __future__ import annotations

import time
from datetime import datetime

import pytest
from harness import Run
from patience import scaled, slowed

from kempner.insight.attempts import InterruptionKind
from kempner.insight.report.summary import read_run
from kempner.run.record.ledger import read_lines

NEAR = scaled(2.0)
"""Seconds that two clocks of one machine, and who reads them, may be apart."""


def test_a_kill_a_hang_and_a_pause_are_counted_as_what_they_were(run: Run) -> None:
    faults = "kill rank 1 at step 13; hang rank 1 at step 27 attempt 2"
    patience = (
        f"--resilience.hang_timeout_min={slowed(4)}",
        f"--resilience.hang_timeout_max={slowed(4)}",
    )
    steps = ("--train.max_steps=100000", *patience)
    job = run.supervise(2, *steps, KEMPNER_FAULTS=faults)
    run.reach(35, job)
    job.signal()
    assert job.wait() == 75
    stopped = time.time()
    run.complete(2, f"--train.max_steps={max(run.steps()) + 20}", *patience)

    found = read_run(run.record).report
    killed, hung, asked = found.interruptions
    assert [one.kind for one in found.interruptions] == [
        InterruptionKind.FAILURE,
        InterruptionKind.HANG,
        InterruptionKind.STOP,
    ]
    assert abs(killed.time - injected(run, attempt=1)) < NEAR
    lost = 12 - last_commit(run, before=started(run, attempt=2))
    assert (killed.place.rank, killed.place.step, killed.place.steps_lost) == (1, 12, lost)
    (detected,) = run.events("hang")
    lasted = detected["time"] - injected(run, attempt=2)
    assert abs(hung.cost.hung_seconds - lasted) < NEAR
    assert found.time.seconds["hung"] == hung.cost.hung_seconds
    lost = 26 - last_commit(run, before=started(run, attempt=3))
    assert (hung.place.rank, hung.place.step, hung.place.steps_lost) == (1, 26, lost)
    assert abs(found.time.seconds["idle"] - (started(run, attempt=4) - stopped)) < NEAR
    assert asked.place.steps_lost == 0
    assert abs(asked.time - stopped) < NEAR
    assert found.time.seconds["unaccounted"] <= 0.01 * found.time.wall
    assert sum(found.time.seconds.values()) == pytest.approx(found.time.wall)
    assert found.time.seconds["save"] > 0
    assert found.training.state == "completed"


def injected(run: Run, attempt: int) -> float:
    """When the injector did it, by its own clock."""
    (line,) = (
        entry
        for entry in read_lines(run.record.log(attempt, rank=1))
        if entry["event"] == "injecting fault"
    )
    return datetime.fromisoformat(line["timestamp"]).timestamp()


def started(run: Run, attempt: int) -> float:
    """When the supervisor began an attempt."""
    (start,) = (e["time"] for e in run.events("attempt_started") if e["attempt"] == attempt)
    return float(start)


def last_commit(run: Run, before: float) -> int:
    """The newest step on disk at a time: a save may end late on a busy machine, and even after the
    death of a rank that had handed its part over."""
    events = run.events("checkpoint_committed")
    return max((event["step"] for event in events if event["time"] < before), default=0)
