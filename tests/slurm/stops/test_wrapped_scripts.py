"""Batch scripts as people write them, changed by `kempner wrap`: warned, requeued, resumed; and a
job that `kempner stop` ends for good."""

from __future__ import annotations

import re
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness import KEMPNER, ROOT, wait_until
from submitting import Project

from kempner.run.record.ledger import read_lines

pytestmark = pytest.mark.timeout(400)

SCRIPTS = ROOT / "tests" / "unit" / "project" / "batch_scripts"

TRAIN = """
import os, pathlib, signal, time
task = os.environ.get("SLURM_ARRAY_TASK_ID", "")
ranks = (os.environ["RANK"], os.environ["SLURM_PROCID"])
assert ranks[0] == ranks[1], ranks
place = pathlib.Path(f"told{task}-{ranks[0]}-of-{os.environ['WORLD_SIZE']}")
count = int(place.read_text().split()[-1]) if place.exists() else 0
asked = []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
def tell(word):
    with place.open("a") as file:
        file.write(f"{word} {count}\\n")
tell("from")
while not pathlib.Path("finish").exists():
    count += 1
    time.sleep(0.05)
    if asked:
        tell("stopped")
        raise SystemExit(75)
pathlib.Path("results").mkdir(exist_ok=True)
tell("done")
"""

CHANGES = {
    "trap_exit": [("/scratch/$USER.", "$PWD/scratch."), ("/archive/$SLURM_JOB_ID", "archive")],
    "heredoc_config": [("gpu:a100:2", "gpu:2")],
    "array_conda": [("--array=0-9%3", "--array=0-1"), ("#SBATCH --mem=32G\n", "")],
    "torchrun_one_node": [("--cpus-per-task=32", "--cpus-per-task=4"), ("-t 1-00:00:00", "-t 60")],
    "exec_redirect": [],
}
"""The scripts that run here, and what this cluster has otherwise: places, GPUs, CPUs."""

RANKS = {"heredoc_config": 2, "torchrun_one_node": 4, "exec_redirect": 2}


@dataclass
class Wrapped:
    """A job of a wrapped script, or an element of its array."""

    project: Project
    name: str
    job: str
    element: str = ""

    @property
    def folder(self) -> Path:
        return self.project.folder / self.name

    @property
    def id(self) -> str:
        return f"{self.job}_{self.element}" if self.element else self.job

    def told(self) -> list[list[str]]:
        """What each rank has said: words with the count that goes with them."""
        files = sorted(self.folder.glob(f"told{self.element}-*"))
        return [file.read_text().splitlines() for file in files]

    def started(self, times: int) -> bool:
        """Whether all ranks have begun so often, and work."""
        told = self.told()
        return len(told) == RANKS.get(self.name, 1) and all(
            sum(line.startswith("from ") for line in lines) == times
            and lines[-1].startswith("from ")
            for lines in told
        )

    def events(self, name: str) -> list[str]:
        suffix = f"-{self.element}" if self.element else ""
        ledgers = self.folder.glob(f"runs/train{suffix}/ledger.jsonl")
        found = [event for ledger in ledgers for event in read_lines(ledger)]
        return [str(event) for event in found if event["event"] == name]

    def log(self) -> str:
        return "".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("**/*.out"))
        )

    def wait(self, condition: object, what: str) -> None:
        assert callable(condition)
        try:
            wait_until(condition, f"{self.name} {self.id}: {what}", 90)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.told()}\n{self.log()}") from None


def submit(project: Project, name: str) -> list[Wrapped]:
    """Wrap a script where it is submitted, and submit it."""
    folder, cluster = project.folder / name, project.cluster
    (folder / "bin").mkdir(parents=True)
    (folder / "logs").mkdir()
    (folder / "bin" / "python").symlink_to(sys.executable)
    (folder / "bin" / "python3").symlink_to(sys.executable)
    (folder / "data").mkdir()
    shutil.make_archive(str(folder / "data"), "tar", folder / "data")
    (folder / "train.py").write_text(TRAIN)
    text = (SCRIPTS / f"{name}.sbatch").read_text()
    for before, after in CHANGES[name]:
        assert before in text
        text = text.replace(before, after)
    (folder / "job.sbatch").write_text(text)
    told = cluster.run("login1", *KEMPNER, "wrap", "job.sbatch", "--write", cwd=folder).stdout
    assert "sbatch --test-only: accepted" in told
    path = f"{folder / 'bin'}:/usr/bin:/bin:/usr/sbin:/sbin"
    job = cluster.sbatch("job.sbatch", cwd=folder, PATH=path)
    elements = ("0", "1") if name == "array_conda" else ("",)
    return [Wrapped(project, name, job, element) for element in elements]


def test_wrapped_scripts_are_warned_requeued_and_resumed(project: Project) -> None:
    jobs = [job for name in CHANGES for job in submit(project, name)]
    for job in jobs:
        job.wait(lambda job=job: job.started(1), "its ranks")
    for job in jobs:
        project.warn(job.id)
    for job in jobs:
        job.wait(lambda job=job: job.events("requeued"), "the requeue")
    for job in jobs:
        job.wait(lambda job=job: job.started(2), "its return")
    for job in jobs:
        (job.folder / "finish").touch()
    for job in jobs:
        job.wait(lambda job=job: all(t[-1].startswith("done") for t in job.told()), "its end")
        project.cluster.wait_for(job.id, "COMPLETED")
        for lines in job.told():
            words = [line.split() for line in lines]
            assert [word for word, _ in words] == ["from", "stopped", "from", "done"]
            assert words[1][1] == words[2][1] != "0"
    staged = project.folder / "trap_exit"
    assert (staged / "archive").is_dir()
    assert not list(staged.glob("scratch.*"))
    assert re.findall(r"^done: ", "".join(p.read_text() for p in staged.glob("slurm-*")), re.M)


@pytest.mark.every_slurm
def test_a_job_that_is_stopped_does_not_come_back(project: Project) -> None:
    (job,) = submit(project, "exec_redirect")
    job.wait(lambda: job.started(1), "its ranks")
    told = project.cluster.run("login1", *KEMPNER, "stop", job.job, cwd=job.folder).stdout
    assert "asked to stop after its step" in told
    assert [lines[-1].split()[0] for lines in job.told()] == ["stopped", "stopped"]
    assert not job.events("requeued")
    assert "stopped by kempner stop" in job.events("not_requeued")[0]
    ended = project.cluster.wait_for(job.job, "COMPLETED", "FAILED", "PENDING", "RUNNING")
    assert ended == "FAILED"
    assert project.cluster.job(job.job)["ExitCode"] == "75:0"
