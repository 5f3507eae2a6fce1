"""A rank that the kernel kills for want of memory is told from one that another process killed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from harness import Run

from kempner.cluster.machine import MemoryGroup
from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(200)


@pytest.mark.cold("its group must have all processes, the fork server included")
def test_an_out_of_memory_kill_is_named_with_the_numbers_and_healed(
    run: Run, limited: Callable[[int], MemoryGroup]
) -> None:
    group = limited(3 << 30)
    job = run.supervise(2, "--checkpoint.in_memory=true", KEMPNER_FAULTS="hog rank 1 at step 25")
    (group.path / "cgroup.procs").write_text(str(job.process.pid))
    assert job.wait(150) == 0, job.output()
    assert group.oom_kills() == 1
    first, last = run.events("attempt_ended")
    assert (first["code"], first["culprit"], last["code"]) == (1, 1, 0)
    told = "rank 1 was killed by SIGKILL: out of memory: the kernel killed it (oom_kill of "
    assert first["reason"].startswith(f"{told}{group.path})")
    assert "of 3.0 GiB were left" in first["reason"]
    (salvaged,) = run.events("step_salvaged")  # the last that was kept: there is no room for more
    assert salvaged["step"] == run.events("resumed")[-1]["step"] >= 23
    assert "steps are not kept in memory any more" in job.output()
    kept = [line["event"] for line in read_lines(run.record.log(2, rank=0))]
    assert "each step is kept in memory" not in kept
    assert "the state was in memory" not in kept
