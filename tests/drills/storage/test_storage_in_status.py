"""Storage that stalls under a run is what its status says while it does, and its report after."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from drilling import SMALLEST_MODEL
from faulty_storage.mount import Mount
from faulty_storage.rules import DELAY, MARK, Match, Rule
from harness import Run, end_jobs, wait_until

from kempner.insight.report.summary import read_run
from kempner.insight.status.activity import Activity
from kempner.insight.status.job import JobWatch
from kempner.insight.status.runs import RunFollower

FAULT = Rule("stale", "ESTALE", Match(("tokens/*.tokens",), ("open", "read")))
AGAIN = Rule("again", MARK, FAULT.match)
SLOW = Rule("slow", DELAY, Match(("tokens/*.tokens",), ("read",)), each=0.03)
STALLED = 8.0
"""Seconds for which the storage fails."""


def test_storage_that_stalls_is_told_while_and_after(
    storage: Mount, tokens: Path, tmp_path: Path
) -> None:
    (storage.folder / "tokens").mkdir()
    for file in tokens.iterdir():
        (storage.folder / "tokens" / file.name).write_bytes(file.read_bytes())
    storage.add(SLOW)
    run = Run(tmp_path / "run", storage.path / "tokens")
    options = (*SMALLEST_MODEL, "--data.num_shards_per_rank=1", "--train.max_steps=2000")
    follower = RunFollower(run.record, JobWatch(None, wait=True), patient=False)
    job = run.supervise(1, *options)

    def does(activity: Activity) -> bool:
        return follower.read().doing.activity is activity

    try:
        wait_until(lambda: does(Activity.TRAINING), "training", job=job)
        run.reach(8, job)
        storage.add(FAULT)
        waits = lambda: does(Activity.WAITING_FOR_STORAGE)  # noqa: E731
        wait_until(waits, "the wait for storage", job=job)
        told = follower.read()
        if told.doing.activity is Activity.WAITING_FOR_STORAGE:
            assert ".tokens: Stale file handle" in told.ranks.waits_for
        began = storage.faults("stale")[0]["time"]
        wait_until(lambda: time.time() - began > STALLED, "the end of the fault", job=job)
        storage.add(AGAIN)
        storage.clear("stale")
        wait_until(lambda: does(Activity.TRAINING), "training again", job=job)
        wait_until(lambda: run.events("storage_waited"), "the ledger", job=job)
        job.signal()
        assert job.wait() == 75
    finally:
        storage.clear()
        end_jobs(run)
    # The rank tries again every five seconds at most: until then it waits.
    stalled = storage.marks("again")[0] - began
    found = read_run(run.record).report
    assert found.time.seconds["storage"] == pytest.approx(stalled, abs=2.0, rel=0.05)
    assert found.time.seconds["unaccounted"] <= 0.01 * found.time.wall
