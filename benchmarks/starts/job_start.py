"""From the start of a job that comes back to its first new step, beside a bare srun.

    python benchmarks/starts/job_start.py [--rounds 5] [--nodes 2]   (as root, with Slurm installed)

On the tests' cluster, one rank a node. In every round, in turns: a job of `kempner supervise` is
warned, saves, goes back into the queue and starts again; and while it is held there, a job whose
script is one srun of a program that imports torch, joins a group and reduces a number. Both are
timed by the first line of their batch script. `bare` is until the group has met; `beyond` is what
kempner's first new step takes more. The parts follow each other: until the attempt begins (the
script, the supervisor, the agents on the nodes), until all ranks are there (they import meanwhile),
until they have met and have loaded, and the first step.

kempner's modules are compiled before, as torch's are and as pip does when it installs them: where
PYTHONDONTWRITEBYTECODE is set, a checkout would be compiled at every start.
"""

from __future__ import annotations

import argparse
import compileall
import statistics
import sys
from collections.abc import Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "slurm")]

import records  # noqa: E402
from lab import Cluster  # noqa: E402
from submitting import Project, project_on_a_cluster  # noqa: E402

from kempner.run.record.ledger import read_lines  # noqa: E402

PROVES = ("kempner/cli", "kempner/cluster", "kempner/run", "kempner/supervisor", "kempner/training")
LONG = ["--train.max_steps=1000000", "--checkpoint.interval=1000000"]
SETTLED = 10
"""Steps before the next warning."""

BARE = """
import os, sys, time
import torch, torch.distributed as dist
rank, size = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
dist.init_process_group("gloo", init_method=sys.argv[1], rank=rank, world_size=size)
dist.all_reduce(torch.ones(1))
if rank == 0:
    print("met", time.time(), flush=True)
dist.destroy_process_group()
"""
"""What each task of the bare job runs; its argument is where the tasks meet."""

STAMP = "echo began $(date +%s.%N)\n"
KEMPNER_SCRIPT = f'#!/bin/bash\n{STAMP}exec bash scripts/slurm/multinode.sh "$@"\n'
OPTIONS = ("--signal=B:SIGTERM@120", "--requeue", "--open-mode=append")


def bare(cluster: Cluster, folder: Path, nodes: int) -> float:
    """Seconds from the first line of a bare job to the meeting of its tasks."""
    program, script, out = folder / "bare.py", folder / "bare.sh", folder / "bare.out"
    program.write_text(BARE)
    out.unlink(missing_ok=True)
    where = '"tcp://$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)-ib:29411"'
    task = f"exec srun --ntasks={nodes} --ntasks-per-node=1 {sys.executable} {program} {where}"
    script.write_text(f"#!/bin/bash\n{STAMP}{task}\n")
    job = cluster.sbatch(
        *(f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2"),
        *(f"--output={out}", str(script)),
        OMP_NUM_THREADS="1",
        GLOO_SOCKET_IFNAME="ib0",
    )
    if cluster.wait_for(job, "COMPLETED", "FAILED") == "FAILED":
        raise RuntimeError(out.read_text())
    told = dict(line.split() for line in out.read_text().splitlines() if line[:3] in ("beg", "met"))
    return float(told["met"]) - float(told["began"])


class Returns:
    """A job that comes back again and again."""

    def __init__(self, project: Project, nodes: int) -> None:
        self.project, cluster = project, project.cluster
        script = project.folder / "stamped.sh"
        script.write_text(KEMPNER_SCRIPT)
        config = str(project.run.config.relative_to(project.folder))
        self.job = cluster.sbatch(
            *(f"--nodes={nodes}", "--ntasks-per-node=1", "--gpus-per-node=1", "--cpus-per-task=2"),
            *(*OPTIONS, f"--output={project.folder}/logs/%j_x.out", str(script), config, *LONG),
            cwd=project.folder,
            KEMPNER_PYTHON=sys.executable,
            OMP_NUM_THREADS="1",
        )
        self._reach_new()

    def leave(self) -> None:
        """Warned, it saves, and is held in the queue."""
        cluster = self.project.cluster
        self.project.warn(self.job)
        cluster.wait_for(self.job, "PENDING")
        cluster.scontrol("hold", self.job)

    def come_back(self) -> dict[str, float]:
        """The moments of its next start."""
        began = len(self._began())
        self.project.cluster.scontrol("release", self.job)
        self.project.wait_until(self.job, lambda: len(self._began()) > began, "the next start")
        self._reach_new()
        return moments(self.project, self._began()[-1])

    def _began(self) -> list[float]:
        said = self.project.log(self.job).splitlines()
        return [float(line.split()[1]) for line in said if line.startswith("began ")]

    def _reach_new(self) -> None:
        before = max(self.project.run.steps(), default=0)
        self.project.reach(self.job, before + SETTLED)


def moments(project: Project, began: float) -> dict[str, float]:
    """When what was reached in the newest attempt, in order, in seconds since the epoch."""
    number = project.run.attempt()
    run = project.run.record
    start = [e for e in read_lines(run.ledger) if e["event"] == "attempt_started"][-1]
    told = [e for e in read_lines(run.supervisor_log(number)) if e["event"] == "rank connected"]
    ready = next(e for e in read_lines(run.log(number, 0)) if e["event"] == "ready")
    first = next(m["time"] for m in project.run.metrics() if m["attempt"] == number)
    joined = next(_time(entry) for entry in told if entry["rank"] == 0)
    connected = max(map(_time, told))
    return {
        "began": began,
        "the attempt begins, its nodes looked at": start["time"],
        "all ranks are there": connected,
        "they have met": max(connected, joined + ready["reached"]["load"]),
        "first step": first,
    }


def _time(entry: dict[str, Any]) -> float:
    return datetime.fromisoformat(entry["timestamp"]).timestamp()


def rows_of(bares: Sequence[float], returns: Sequence[dict[str, float]]) -> list[dict[str, Any]]:
    """Of the bare job, of kempner's, of what it takes more in the same round, and of its parts."""
    whole = [each["first step"] - each["began"] for each in returns]
    names = list(returns[0])
    parts = {
        after: [each[after] - each[before] for each in returns] for before, after in pairwise(names)
    }
    return [
        row("a bare srun until its tasks have met", "whole", bares),
        row("kempner until the first new step", "whole", whole),
        row("beyond", "whole", [ours - bare for ours, bare in zip(whole, bares, strict=True)]),
        *(row(f"until {name}", "part", seconds) for name, seconds in parts.items()),
    ]


def row(what: str, kind: str, seconds: Sequence[float]) -> dict[str, Any]:
    ends = [min(seconds), max(seconds)]
    return {"s": what, "kind": kind, "median": statistics.median(seconds), "range": ends}


def main() -> None:
    """Print what each part took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--nodes", type=int, default=2)
    records.add_option(parser)
    options = parser.parse_args()
    bares, found = list[float](), list[dict[str, float]]()
    compileall.compile_dir(ROOT / "kempner", quiet=1)
    with project_on_a_cluster() as project:
        returns = Returns(project, options.nodes)
        for _ in range(options.rounds):
            returns.leave()
            bares.append(bare(project.cluster, project.folder, options.nodes))
            found.append(returns.come_back())
            whole = found[-1]["first step"] - found[-1]["began"]
            print(f"bare {bares[-1]:.2f} s, kempner {whole:.2f} s", flush=True)
    records.result(options.record, "job start", PROVES, rows_of(bares, found))


if __name__ == "__main__":
    main()
