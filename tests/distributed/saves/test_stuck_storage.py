"""Storage that does not answer must not keep a rank from leaving."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from harness import Job, Run, drills, wait_until, write_tokens
from patience import slowed

pytestmark = pytest.mark.timeout(200)


def stuck_on(fifo_readers: list[psutil.Process]) -> int:
    """How many of these processes have a thread that waits for a FIFO's other end to open."""
    count = 0
    for process in fifo_readers:
        with suppress(OSError, psutil.Error):
            waits = [
                (task / "wchan").read_text() for task in Path(f"/proc/{process.pid}/task").iterdir()
            ]
            count += any("fifo" in where or "wait_for_partner" in where for where in waits)
    return count


def family(job: Job) -> list[psutil.Process]:
    return psutil.Process(job.process.pid).children(recursive=True)


@pytest.mark.parametrize(("world", "workers"), [(1, 0), (2, 1), *drills((1, 2), (2, 0), (2, 2))])
def test_a_reader_stuck_on_storage_does_not_keep_the_ranks_from_leaving(
    tmp_path: Path, world: int, workers: int
) -> None:
    data = tmp_path / "data"
    write_tokens(data, [[n % 251 for n in range(4000)], [7, 8, 9] * 1500])
    run = Run(tmp_path / "stuck", data)
    job = run.supervise(
        world,
        "--train.max_steps=100000",
        "--data.num_shards_per_rank=1",  # every change between the two files opens one anew
        f"--data.num_dataloader_workers={workers}",
    )
    run.reach(3, job)
    for part in data.glob("part-*"):
        os.mkfifo(tmp_path / part.name)
        (tmp_path / part.name).replace(part)
    wait_until(lambda: stuck_on(family(job)) >= 1, "a reader stuck in open()", job=job)
    ranks = family(job)
    job.signal()
    assert job.wait(30) == 75, job.output()
    assert run.latest() == max(run.steps())
    assert [s for ids in run.samples().values() for s in ids] == list(range(8 * run.latest()))
    wait_until(lambda: not any(p.is_running() for p in ranks), "every process to be gone")


def test_a_save_that_does_not_end_is_left_to_itself_at_the_deadline(run: Run) -> None:
    """The commit asks which attempt is current, and the storage does not answer."""
    endless = ("--train.max_steps=1000000", "--checkpoint.interval=100")
    job = run.supervise(2, *endless, f"--supervise.stop_grace={slowed(6)}")
    wait_until((run.checkpoints / "latest").exists, "a commit", job=job)
    fifo = run.folder / "fifo"
    os.mkfifo(fifo)
    fifo.replace(run.record.attempts / "CURRENT")
    wait_until(lambda: stuck_on(family(job)), "a commit that hangs", job=job)
    kept = run.latest()
    job.signal()
    assert job.wait(30) == 75, job.output()
    assert run.latest() == kept
    assert "the save in flight did not finish in time" in job.output()
    assert run.events("stopped")[-1]["lost_steps"] == max(run.steps()) - kept

    job = run.supervise(2, *endless)
    run.reach(max(run.steps()) + 1, job)
    assert f"resumed at step {kept}," in job.output()
    job.signal()
    assert job.wait() == 75, job.output()
    assert run.latest() == max(run.steps())
