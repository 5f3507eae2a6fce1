"""A rank that is slow is told from a run that is slow."""

from __future__ import annotations

import itertools
import os
import platform
import signal
import time

import pytest
from harness import Run, wait_until

pytestmark = pytest.mark.timeout(400)

ENDLESS = ("--train.max_steps=1000000", "--checkpoint.interval=1000000")


def test_a_rank_slowed_to_a_third_is_named(run: Run) -> None:
    job = run.supervise(3, *ENDLESS, KEMPNER_FAULTS="slow rank 1 by 3 from step 20")
    wait_until(lambda: run.events("straggler"), "the straggler is named", 150, job)
    (told,) = run.events("straggler")
    assert (told["rank"], told["node"]) == (1, platform.node())
    assert told["worked"] > 2 * told["usual"]
    assert f"rank 1 on {platform.node()} works" in job.output()
    assert run.events("suspect") == []
    job.signal()
    assert job.wait() == 75, job.output()
    first, *slow = (line for line in run.metrics() if line["step"] >= 20)
    before, after = slow[-2:]
    # A third of a step of rank 1 is work: rank 0 waits for the rest, and says so.
    waited = sum(line["wait_seconds"] for line in slow)
    assert waited / (after["time"] - first["time"]) > 1 / 3
    assert sum(line["data_seconds"] for line in slow) < waited
    speed = (after["tokens"] - before["tokens"]) / after["tokens_per_second"]
    assert speed == pytest.approx(after["time"] - before["time"], rel=0.1, abs=0.01)


@pytest.mark.drill
def test_a_rank_that_gets_a_third_of_the_time_is_named(run: Run) -> None:
    """Of `make check` the one above is a part: there the rank slows itself down."""
    job = run.supervise(3, *ENDLESS, "--model.dim=256", "--train.seq_len=128")
    victim = run.ready_pid(1, 2, job)
    turns = itertools.cycle([(signal.SIGSTOP, 0.4), (signal.SIGCONT, 0.2)])

    def named() -> bool:
        number, seconds = next(turns)
        os.kill(victim, number)
        time.sleep(seconds)  # the fault itself: how long it is stopped, and how long it runs
        return bool(run.events("straggler"))

    wait_until(named, "the straggler is named", 150, job)
    (told,) = run.events("straggler")
    assert told["rank"] == 2
    os.kill(victim, signal.SIGCONT)
    job.signal()
    assert job.wait() == 75, job.output()


@pytest.mark.drill
def test_a_uniformly_slow_run_has_no_straggler(run: Run) -> None:
    """`make check` has a part of it: tests/unit/supervisor/monitors/test_straggler.py."""
    slow = ";".join(f"slow rank {rank} by 3 from step 600" for rank in range(3))
    job = run.supervise(3, *ENDLESS, KEMPNER_FAULTS=slow)
    wait_until(lambda: run.events("slow_down"), "the run is called slow", 280, job)
    assert run.events("straggler") == []
    job.signal()
    assert job.wait() == 75, job.output()
