"""SIGTERM at random moments of a save, with loader workers: the checkpoint is committed."""

from __future__ import annotations

import os
import signal
from random import Random

import pytest
from drill import SEED, SMALLEST, Saving, attach, note
from harness import Run
from promises import broken
from tracer import Call, supported

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(not supported(), reason="the tracer knows the system calls of x86_64 only"),
]

WORLD, STEPS, STOPS, LONGEST = 2, 60, 3, 60
LONG = (
    f"--train.max_steps={STEPS}",
    "--checkpoint.interval=3",
    "--data.num_dataloader_workers=2",
    *SMALLEST,
)


def test_three_stops_in_the_middle_of_a_save(run: Run, reference: Run) -> None:
    reference.complete(WORLD, *LONG)
    random, stopped_on = Random(SEED), list[int]()
    for target in random.sample(("supervisor", "rank 0", "rank 1"), STOPS):
        job, saving, countdown = run.supervise(WORLD, *LONG), Saving(run), random.randrange(LONGEST)
        stopped_at: list[Call] = []

        def stop(call: Call, rank: int, target: str = target) -> None:
            nonlocal countdown
            if stopped_at or saving.moment(call, rank) is None:
                return
            if countdown == 0 and target in ("supervisor", f"rank {rank}"):
                stopped_at.append(call)
                os.kill(job.process.pid if target == "supervisor" else call.pid, signal.SIGTERM)
            countdown = max(0, countdown - 1)

        tracer = attach(run, job, WORLD, entered=stop)
        assert job.wait() == 75, job.output()
        tracer.join()
        stopped_on.append(run.latest())
        assert stopped_on[-1] == max(run.steps())
        assert not broken(run.checkpoints, stopped_on[-1])
        assert not list(run.checkpoints.glob(".*"))
        note("stop in a save", target=target, before=stopped_at[0].name, committed=stopped_on[-1])
    assert stopped_on == sorted(set(stopped_on))
    run.complete(WORLD, *LONG)
    assert run.steps() == reference.steps()
    assert [s for ids in run.samples().values() for s in ids] == list(range(2 * STEPS))
