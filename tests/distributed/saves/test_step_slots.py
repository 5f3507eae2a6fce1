"""Steps that are kept in memory: what becomes of them when there is no time to save, when they do
not help, and without a supervisor."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from harness import KEMPNER, Run, rank_processes, wait_until

pytestmark = pytest.mark.timeout(240)

RARELY = "--checkpoint.interval=20"
IN_MEMORY = "--checkpoint.in_memory=true"


def test_what_is_in_memory_is_salvaged_and_gets_one_chance(run: Run, reference: Run) -> None:
    """A stop leaves no time to save, and the next start dies in its first step."""
    reference.complete(2, RARELY)
    faults = "slow rank 1 by 40 from step 24; kill rank 0 from step 1 attempt 2"
    job = run.supervise(2, RARELY, IN_MEMORY, "--supervise.stop_grace=1", KEMPNER_FAULTS=faults)
    run.reach(24, job)
    job.signal()
    assert job.wait() == 75, job.output()
    (salvaged,) = run.events("step_salvaged")
    assert salvaged["step"] == run.latest() == max(run.steps())
    assert salvaged["saved"] == salvaged["step"] - 20 > 0
    subprocess.run([*KEMPNER, "checkpoint", "verify", run.checkpoints], check=True)

    job = run.supervise(2, RARELY, IN_MEMORY, KEMPNER_FAULTS=faults)
    assert job.wait() == 0, job.output()
    assert [event["step"] for event in run.events("resumed")] == [salvaged["step"], 20]
    (dismissed,) = run.events("salvage_dismissed")
    assert (dismissed["step"], dismissed["back_to"]) == (salvaged["step"], 20)
    assert (run.checkpoints / dismissed["kept_as"]).is_dir()
    assert run.weights() == reference.weights()
    assert run.samples() == reference.samples()
    assert run.steps() == reference.steps()


def test_what_a_rollback_left_behind_is_not_salvaged(run: Run, reference: Run) -> None:
    """A rank dies as soon as the ranks have gone back: in memory was what they went back behind."""
    bad = "; ".join(f"nan rank 0 at step {step} attempt 1" for step in (24, 25, 26))
    options = "--resilience.rollback_after=3", "--train.max_steps=40"
    job = reference.supervise(2, *options, KEMPNER_FAULTS=bad)
    assert job.wait() == 0, job.output()
    job = run.supervise(2, IN_MEMORY, *options, KEMPNER_FAULTS=bad)
    wait_until(lambda: run.events("rolled_back"), "the rollback", job=job, interval=0.01)
    holders = rank_processes(job)[0].parents()
    kept = {inode for each in holders for inode in memory_held(each.pid)}
    assert kept
    rank_processes(job)[1].kill()
    assert job.wait() == 0, job.output()
    assert not kept & memory_held("[0-9]*")
    made = [step["step"] for step in run.metrics() if step["attempt"] == 1][-1]
    assert made < 40
    assert all(made - 1 <= each["step"] <= made for each in run.events("step_salvaged"))
    assert all(event["step"] <= made for event in run.events("resumed"))
    assert run.weights() == reference.weights()
    assert run.samples() == reference.samples()


def test_a_rank_that_nobody_outlives_keeps_nothing_and_says_so(run: Run) -> None:
    job = run.train(IN_MEMORY)
    assert job.wait() == 0, job.output()
    assert "steps are not kept in memory (reason nothing that outlives a rank" in job.output()


def memory_held(process: int | str) -> set[int]:
    """The inodes of steps in memory that a process holds open, or all that the pattern names."""
    held = set()
    for link in Path("/proc").glob(f"{process}/fd/*"):
        try:
            if str(link.readlink()).startswith("/memfd:kempner-"):
                held.add(link.stat().st_ino)
        except OSError:  # closed meanwhile
            continue
    return held
