"""What one job asks of Slurm: at its start, in an hour of training, and at a stop with a requeue.

    python benchmarks/asked_of_slurm.py [--minutes 5] [--nodes 2]    (as root, with Slurm installed)

On the tests' cluster each command of Slurm's is counted by a wrapper that comes first on PATH, by
whichever process of the job runs it, the watchdog included. What asks no controller (a version, a
help, the names of a host list) is left out. The hour is a few minutes, multiplied.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "slurm")]

import records  # noqa: E402
from submitting import Project, project_on_a_cluster  # noqa: E402

PROVES = ("kempner/cluster/slurm", "kempner/supervisor")
LONG = ["--train.max_steps=1000000", "--checkpoint.interval=1000000"]
COMMANDS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")
STARTED = 30.0
"""Seconds after the first step by which the questions of a start are over."""

WRAPPER = '#!/bin/sh\necho "{name} $1 $2" >> {file}\nexec {command} "$@"\n'
LOCAL = ("scontrol --version", "scontrol show hostnames", "srun --help", "srun --version")


class Counted:
    """What was asked since the last time."""

    def __init__(self, folder: Path) -> None:
        self.bin, self._file, self._read = folder / "bin", folder / "asked", 0
        self.bin.mkdir()
        for name in COMMANDS:
            wrapper = self.bin / name
            command = Path("/usr/bin") / name
            wrapper.write_text(WRAPPER.format(name=name, file=self._file, command=command))
            wrapper.chmod(0o755)

    def take(self, times: float = 1.0) -> dict[str, Any]:
        lines = self._file.read_text().splitlines()[self._read :]
        self._read += len(lines)
        asked = [_question(line) for line in lines if not line.startswith(LOCAL)]
        found = {name: round(times * n) for name, n in sorted(Counter(asked).items())}
        return {"requests": sum(found.values()), "of them": found}


def _question(line: str) -> str:
    """The command, and of scontrol what is asked."""
    words = line.split()
    return " ".join(words[: 1 + 2 * (words[0] == "scontrol")] if "show" in words else words[:1])


def measure(project: Project, counted: Counted, minutes: float, nodes: int) -> list[dict[str, Any]]:
    path = f"{counted.bin}:{os.environ['PATH']}"
    job = project.train(*LONG, nodes=nodes, options=("--time=180",), PATH=path)
    project.reach(job, 1, deadline=300)
    time.sleep(STARTED)
    rows = [{"when": "at a start", **counted.take()}]
    time.sleep(60 * minutes)
    rows.append({"when": "in an hour", **counted.take(60 / minutes)})
    project.warn(job)
    project.cluster.wait_for(job, "PENDING")
    return [*rows, {"when": "at a stop and a requeue", **counted.take()}]


def main() -> None:
    """Print what was counted."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--nodes", type=int, default=2)
    records.add_option(parser)
    options = parser.parse_args()
    with project_on_a_cluster() as project:
        rows = measure(project, Counted(project.folder), options.minutes, options.nodes)
    records.result(options.record, "asked of slurm", PROVES, rows)


if __name__ == "__main__":
    main()
