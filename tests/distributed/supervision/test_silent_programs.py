"""Programs that say nothing of themselves: what the kernel counts of their processes decides."""

from __future__ import annotations

import os
import sys
import time

import pytest
import warm
from harness import KEMPNER, Job, Run, wait_until
from patience import slowed
from tracing import can_trace

pytestmark = pytest.mark.timeout(400)

PROGRAM = """
import os
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
if os.environ["KEMPNER_ATTEMPT"] == "1" and dist.get_rank() == 0:
    dist.broadcast(torch.ones(1), 0)
dist.barrier()
open("at-work", "w").close()
while dist.get_rank() == 0 and not os.path.exists("go-on"):
    torch.randn(300, 300) @ torch.randn(300, 300)
dist.barrier()
"""


def test_ranks_that_wait_for_each_other_are_ended_and_those_that_wait_for_work_are_not(
    run: Run,
) -> None:
    """Before the first word of a program: where its ranks stand is read from outside."""
    (run.folder / "program.py").write_text(PROGRAM)
    log, limit = run.folder / "job.out", slowed(15.0, most=60.0)
    limits = (f"--resilience.hang_timeout_min={limit}", f"--resilience.hang_timeout_max={limit}")
    where = (f"--run.dir={run.folder}/runs", "--run.name=run", "--nproc=2", *limits)
    command = [*KEMPNER, "supervise", *where, "--", sys.executable, "program.py"]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        run.jobs.append(job := Job(warm.start(command, environ, out, run.folder), log))
    wait_until((run.folder / "at-work").exists, "the second start", job=job, deadline=180)
    (hang,) = run.events("hang")
    places = hang["own_program"]["places"]
    seen = ("broadcast", "barrier") if can_trace() else ()
    waits = {f"in {kind} at program.py:{_line(kind)}" for kind in seen}
    assert set(places.values()) == waits, hang
    assert all(words in hang["reason"] for words in waits)
    since = time.monotonic()
    wait_until(lambda: time.monotonic() - since > 1.5 * limit + 10, "longer than a hang", job=job)
    (run.folder / "go-on").touch()
    assert job.wait() == 0, job.output()
    assert len(run.events("hang")) == 1


def _line(collective: str) -> int:
    lines = PROGRAM.splitlines()
    return next(at for at, line in enumerate(lines, 1) if f"dist.{collective}(" in line)
