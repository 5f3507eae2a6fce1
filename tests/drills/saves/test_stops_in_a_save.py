"""SIGTERM at random moments of a save, with loader workers: the checkpoint is committed.

`make check` has a stop in a save: tests/distributed/stops/test_stop_and_resume.py.
"""

from __future__ import annotations

import os
import signal
from random import Random

import pytest
from drill import SMALLEST, Saving, attach
from drilling import ALL, SEED, note
from harness import Run
from promises import broken
from tracer import Call, supported

pytestmark = [
    pytest.mark.drill,
    pytest.mark.timeout(900),
    pytest.mark.skipif(not supported(), reason="the tracer knows the system calls of x86_64 only"),
]

WORLD, LONGEST = 2, 60
TARGETS = ("supervisor", "rank 0", "rank 1")
STOPS, STEPS = (3, 60) if ALL else (1, 20)
LONG = (
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=3",
    "--data.num_dataloader_workers=2",
    *SMALLEST,
)


def stop_in_a_save(run: Run, target: str, countdown: int) -> str:
    """Start the run and send SIGTERM to `target` before the n-th call of a save; which call."""
    job = run.supervise(WORLD, *LONG)
    saving, made = Saving(run), list[str]()

    def stop(call: Call, rank: int) -> None:
        if saving.moment(call, rank) is not None and target in ("supervisor", f"rank {rank}"):
            made.append(call.name)
            if len(made) == countdown:
                os.kill(job.process.pid if target == "supervisor" else call.pid, signal.SIGTERM)

    tracer = attach(run, job, WORLD, entered=stop)
    assert job.wait(120) == 75, job.output()
    tracer.join()
    return made[countdown - 1]


def test_three_stops_in_the_middle_of_a_save(run: Run, reference: Run) -> None:
    reference.complete(WORLD, *LONG)
    random, stopped_on = Random(SEED), [0]
    for target in random.sample(TARGETS, STOPS):
        before = stop_in_a_save(run, target, random.randint(1, LONGEST))
        stopped_on.append(run.latest())
        assert stopped_on[-1] == max(run.steps()) > stopped_on[-2]
        assert not broken(run.checkpoints, stopped_on[-1])
        assert not list(run.checkpoints.glob(".*"))
        note("stop in a save", target=target, before=before, committed=stopped_on[-1])
    run.complete(WORLD, *LONG)
    assert run.steps() == reference.steps()
    assert [s for ids in run.samples().values() for s in ids] == list(range(2 * STEPS))
