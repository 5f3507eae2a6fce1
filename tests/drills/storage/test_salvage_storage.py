"""A salvage into storage that fails: for a moment that costs nothing, for good the last steps."""

from __future__ import annotations

from pathlib import Path

import pytest
from drilling import note
from faulty_storage.mount import Mount
from faulty_storage.rules import HANG, Match, Rule
from harness import Job, Run, end_jobs, wait_until

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(240)

KILLED = 12
OPTIONS = ("--train.max_steps=30", "--checkpoint.interval=1000")
LAST = "checkpoints/step-00000030"
SALVAGE = ("checkpoints/.step-*.a1-*/*",)
"""The files of a checkpoint that the first attempt leaves: nothing but a salvage writes any."""


def start(run: Run, storage: Mount, *options: str) -> Job:
    """Rank 1 dies in a step, and all that is on the mount are the checkpoints."""
    folder = f"--checkpoint.dir={storage.path}/checkpoints"
    fault = f"kill rank 1 at step {KILLED}"
    every = (*OPTIONS, "--checkpoint.in_memory=true", folder, *options)
    return run.supervise(2, *every, KEMPNER_FAULTS=fault)


def weights_of(checkpoint: Path) -> dict[str, bytes]:
    """As `Run.weights`."""
    return {path.name: path.read_bytes() for path in checkpoint.glob("sums-*.json")}


@pytest.mark.parametrize(
    ("fault", "operations"),
    [("EIO", ("create", "write")), ("ENOSPC", ("write",)), (HANG, ("write", "fsync"))],
)
def test_what_fails_for_a_moment_is_waited_for(
    run: Run, reference: Run, storage: Mount, fault: str, operations: tuple[str, ...]
) -> None:
    reference.complete(2, *OPTIONS)
    storage.add(Rule("fault", fault, Match(SALVAGE, operations), seconds=4.0))
    job = start(run, storage)
    try:
        assert job.wait(120) == 0, job.output()
        assert storage.faults("fault")
    finally:
        storage.clear()
        end_jobs(run)
    (salvaged,) = run.events("step_salvaged")
    note("salvage into faulty storage", fault=fault, seconds=salvaged["seconds"])
    assert salvaged["step"] >= KILLED - 2
    assert [event["step"] for event in run.events("resumed")] == [salvaged["step"]]
    assert weights_of(storage.folder / LAST) == reference.weights()
    assert run.samples() == reference.samples()


def test_what_hangs_for_good_is_left_behind_and_harms_nothing_when_it_wakes_up(
    run: Run, reference: Run, storage: Mount
) -> None:
    reference.complete(2, *OPTIONS)
    storage.add(Rule("fault", HANG, Match(SALVAGE, ("write",))))
    job = start(run, storage, "--resilience.patience=5")
    try:
        wait_until(lambda: run.attempt() == 2, "the next attempt", 60, job)
        run.reach(4, job)
        assert storage.faults("fault")
        storage.clear("fault")  # the salvage goes on, beside the next attempt
        assert job.wait(120) == 0, job.output()
    finally:
        storage.clear()
        end_jobs(run)
    assert run.events("step_salvaged") == []
    given_up = "the steps in memory are not waited for any longer"
    assert given_up in [line["event"] for line in read_lines(run.record.supervisor_log(1))]
    assert sorted(path.name for path in (storage.folder / "checkpoints").glob("*")) == [
        "latest",
        "step-00000030",
    ]
    assert run.samples() == reference.samples()
    assert weights_of(storage.folder / LAST) == reference.weights()
