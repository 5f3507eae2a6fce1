"""The project's own scripts, submitted to the lab: a tiny run on a folder that all nodes share."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import KEMPNER, MISTAKE, ROOT, Run, wait_until
from lab import Cluster
from neighbours import Neighbours

TINY_OF_7B = [
    "--model.dim=32",
    "--model.n_layers=2",
    "--model.n_heads=2",
    "--model.ffn_dim=64",
    "--model.vocab_size=257",
    "--train.max_steps=30",
    "--train.global_batch_size=8",
    "--train.seq_len=32",
    "--train.threads=1",
    "--train.log_samples=true",
    "--data.num_dataloader_workers=0",
    "--checkpoint.interval=10",
    "--eval.interval=20",
    "--eval.max_batches=1",
]
"""What makes configs/train/7b.toml small enough for two cores."""


STEPS = 120

LONG = [f"--train.max_steps={STEPS}", "--checkpoint.interval=10"]
"""Overrides for a run with time for many things to happen to it."""


def assert_like(run: Run, reference: Run) -> None:
    """Every loss and gradient norm as in the undisturbed run, every sample exactly once."""
    assert run.steps() == reference.steps()
    assert sorted(run.taken()) == list(range(8 * len(reference.steps())))


@dataclass
class Project:
    """A copy of the project's scripts, as a researcher has them, with a tiny run in it."""

    cluster: Cluster
    folder: Path
    run: Run
    neighbours: Neighbours | None = None
    """Others, whose jobs come with the first one of this project."""

    @classmethod
    def make(cls, cluster: Cluster, folder: Path, data: Path) -> Project:
        for name in ("scripts", "configs"):
            shutil.copytree(ROOT / name, folder / name)
        (folder / "logs").mkdir()
        return cls(cluster, folder, Run(folder / "tiny", data))

    def submit(
        self, script: str, *arguments: str, options: tuple[str, ...] = (), **environ: str
    ) -> str:
        """sbatch a script of the project with one CPU rank per node; returns the job's id."""
        resources = ["--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2"]
        job = self.cluster.sbatch(
            *resources,
            *options,
            f"scripts/slurm/{script}",
            *arguments,
            cwd=self.folder,
            KEMPNER_PYTHON=sys.executable,
            OMP_NUM_THREADS="1",
            **environ,
        )
        if self.neighbours is not None:
            self.neighbours.come_with(job)
        return job

    def train(
        self, *overrides: str, nodes: int = 2, options: tuple[str, ...] = (), **environ: str
    ) -> str:
        """Submit the tiny run over some nodes."""
        config = str(self.run.config.relative_to(self.folder))
        options = (f"--nodes={nodes}", *options)
        return self.submit("multinode.sh", config, *overrides, options=options, **environ)

    def log(self, job: str) -> str:
        """What the job has printed so far."""
        return "".join(path.read_text() for path in (self.folder / "logs").glob(f"{job}_*.out"))

    def reach(self, job: str, step: int, deadline: float = 120.0) -> None:
        """Wait until the run has made a step."""
        made = lambda: any(s >= step for s in self.run.steps())  # noqa: E731
        self.wait_until(job, made, f"step {step}", deadline)

    def wait_until(
        self, job: str, condition: Callable[[], Any], what: str, deadline: float = 120.0
    ) -> None:
        """Wait until something has happened; the logs are shown if it does not."""
        try:
            wait_until(condition, f"{what} of job {job}", deadline)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log(job)}\n{self._last_words()}") from None

    def _last_words(self) -> str:
        """The last lines of what each process of the newest attempt has written."""
        logs = sorted(self.run.record.attempts.glob("*/*.jsonl"))
        newest = [log for log in logs if log.parent == logs[-1].parent]
        return "\n".join("\n".join(log.read_text().splitlines()[-8:]) for log in newest)

    def end(self, job: str, *states: str, deadline: float = 180.0) -> str:
        """Wait for the job's end; its log is shown if that is not in one of `states`."""
        wanted = states or ("COMPLETED",)
        over = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        ended = self.cluster.wait_for(job, *over, deadline=deadline)
        said = self.log(job)
        assert ended in wanted, f"{ended}\n{said}"
        assert MISTAKE not in said, said
        return ended

    def warn(self, job: str) -> None:
        """What --signal=B:SIGTERM@120 does, at a moment of our choosing."""
        self.cluster.run("login1", "scancel", "--batch", "--signal=TERM", job)

    def end_in_minutes(self, job: str, minutes: int) -> None:
        """Have a job's time be over in `minutes`, to the next full one of its run time."""
        hours, gone, _ = self.cluster.job(job)["RunTime"].rpartition("-")[2].split(":")
        limit = 60 * int(hours) + int(gone) + 1 + minutes
        self.cluster.scontrol("update", f"jobid={job}", f"TimeLimit={limit}")

    def slow(self, *nodes: str, rate: str = "4mbit") -> None:
        """Have steps take a second or so, because of the network, until `hurry`."""
        for node in nodes or ("node1", "node2"):
            self.cluster.slow(node, "ib0", rate)

    def hurry(self) -> None:
        """Have steps take no longer than they must."""
        for node in self.cluster.options.node_names:
            if self.cluster.machines[node].up:
                self.cluster.heal(node, "ib0")

    def ranks(self, node: str) -> list[int]:
        """The processes of the ranks that the agent of a node has forked, as numbered outside."""
        processes = self.cluster.machines[node].processes()
        return [pid for pid, name in processes.items() if name.startswith("rank ")]

    def signal_ranks(self, node: str, number: signal.Signals) -> None:
        """Signal every rank on a node."""
        ranks = self.ranks(node)
        assert ranks, f"no rank on {node}"
        _signal(ranks, number)

    def held(self, node: str, moment: Callable[[], bool]) -> Callable[[], bool]:
        """A condition for `wait_until`: it is that moment, and stays it, as the node's ranks stand
        still. They are looked for before it comes, which takes longer than a save."""
        found: list[int] = []

        def hold() -> bool:
            if not found or not all(Path(f"/proc/{pid}").exists() for pid in found):
                found[:] = self.ranks(node)
            if not found or not moment():
                return False
            _signal(found, signal.SIGSTOP)
            if moment():
                return True
            _signal(found, signal.SIGCONT)
            return False

        return hold

    def attempt(self, job: str, number: int) -> None:
        """Wait until the ranks are launched for the `number`th time."""
        self.wait_until(job, lambda: self.run.attempt() >= number, f"attempt {number}")

    def events(self, name: str) -> list[dict[str, Any]]:
        """The ledger's lines of one event."""
        return self.run.events(name)

    def assert_states(self, job: str, *expected: str) -> None:
        """Accounting, which hears of it later, says how each launch ended, oldest first."""
        found: list[str] = []

        def as_expected() -> bool:
            rows = self.cluster.sacct(job, "JobID", "State", duplicates=True)
            found[:] = [row["State"].split()[0] for row in rows if "." not in row["JobID"]]
            return found == list(expected)

        try:
            wait_until(as_expected, f"{expected} in accounting", 60)
        except AssertionError as error:
            raise AssertionError(f"{error}, which says {found}\n{self.log(job)}") from None


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for pid in processes:
        with suppress(ProcessLookupError):  # it has just ended
            os.kill(pid, number)


@contextmanager
def project_on_a_cluster() -> Iterator[Project]:
    """A project with a small text, on a cluster that is up in this block: for benchmarks."""
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {n} of {n * n % 977}" for n in range(20_000)))
    subprocess.run([*KEMPNER, "prepare", "--out", folder / "tokens", text], check=True)
    cluster = Cluster(folder / "lab")
    try:
        cluster.up()
        yield Project.make(cluster, folder / "project", folder / "tokens")
    finally:
        cluster.down()
