"""A rank that is slow is told from a run that is slow."""

from __future__ import annotations

import platform

import pytest
from harness import Run, wait_until

pytestmark = pytest.mark.timeout(300)

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
