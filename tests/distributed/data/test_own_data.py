"""A loop over a DataLoader with workers: each sample once, whatever ends it, in any world."""

from __future__ import annotations

import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
import warm
from harness import KEMPNER, ROOT, Job, wait_until

from kempner.data.order.shuffle import SampleOrder
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory

pytestmark = pytest.mark.timeout(300)

EXAMPLE = ROOT / "docs" / "examples" / "own_data.py"
STEPS, ACCUMULATION, BATCH = 1000, 2, 12
"""As the example has them."""


@dataclass
class Program:
    """The example, in a folder of its own."""

    folder: Path
    jobs: list[Job] = field(default_factory=list)

    def start(self, nproc: int) -> Job:
        self.folder.mkdir(exist_ok=True)
        log = self.folder / f"job-{len(self.jobs)}.out"
        command = [*KEMPNER, "supervise", f"--nproc={nproc}", "--", sys.executable, str(EXAMPLE)]
        with open(log, "wb") as out:
            process = warm.start(command, os.environ, out, self.folder, spare=True)
        self.jobs.append(Job(process, log))
        return self.jobs[-1]

    @property
    def run(self) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / "own_data")

    def samples(self, attempt: int) -> dict[int, list[int]]:
        """What all ranks trained on in each step; each job has one attempt."""
        found: dict[int, list[int]] = {}
        for file in self.run.attempt(attempt).glob("rank-*.out"):
            for step, indices in re.findall(r"step (\d+) samples \[(.*)\]\n", file.read_text()):
                found.setdefault(int(step), []).extend(map(int, indices.split(", ")))
        return found

    def reach(self, step: int, job: Job) -> None:
        attempt = len(self.jobs)
        wait_until(lambda: max(self.samples(attempt), default=0) >= step, f"step {step}", job=job)

    def events(self, event: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.run.ledger) if e["event"] == event]


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Program]:
    """Whatever it leaves running is killed."""
    program = Program(tmp_path / "own")
    yield program
    for job in program.jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


def is_alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def expected(step: int) -> list[int]:
    order, size = SampleOrder(1000, seed=3), ACCUMULATION * BATCH
    return [order.locate(position)[1] for position in range((step - 1) * size, step * size)]


def test_the_example_trains_on_each_sample_once_and_changes_its_world(program: Program) -> None:
    """Slurm sends its signals to all processes of a step, the workers of a loader among them."""
    job = program.start(nproc=3)
    program.reach(5, job)
    processes = psutil.Process(job.process.pid).children(recursive=True)
    for process in processes:
        with suppress(psutil.NoSuchProcess):  # some have asked Slurm, say, and are done
            process.send_signal(signal.SIGTERM)
    assert job.wait() == 75, job.output()
    (stopped,) = program.events("stopped")
    assert stopped["lost_steps"] == 0
    wait_until(lambda: not any(map(is_alive, processes)), "nothing of it is left", 30)

    job = program.start(nproc=2)
    program.reach(stopped["step"] + 5, job)
    job.signal()
    assert job.wait() == 75, job.output()

    job = program.start(nproc=1)
    assert job.wait() == 0, job.output()
    steps = 0
    for attempt in (1, 2, 3):
        for step, samples in sorted(program.samples(attempt).items()):
            assert step == steps + 1
            assert sorted(samples) == sorted(expected(step)), step
            steps = step
    assert steps == STEPS
