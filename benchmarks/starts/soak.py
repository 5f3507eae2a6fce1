"""Restarts of ranks under one supervisor and its agents: what is left of each?

    python benchmarks/starts/soak.py [--restarts 2000] [--at 10 100 500 1000 2000]

Needs what `tests/slurm/lab.py` needs. On two nodes of the tests' cluster, one rank each, a rank is
killed as soon as its attempt has committed a step, again and again. At some of the restarts the
processes that outlive the ranks are looked at, in training again: memory of their own, descriptors,
threads, of each kind the most; and the files of the run. Since the look before: the median seconds
from a kill to the next commit, and the processor time that a restart costs the supervisor, an
agent, and the new first rank until then.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests"), str(Path(__file__).parent)]

import records  # noqa: E402
from lab import Cluster  # noqa: E402
from rank_start import write_tokens  # noqa: E402
from restart import CONFIG, PROVES  # noqa: E402

WITHIN = 300.0
"""Seconds for a restart, however busy the machine is."""

KINDS = {
    "supervisor": ("kempner", "supervise"),
    "agent": ("kempner.supervisor.launchers.agents.node_agent",),
    "fork server": ("kempner.supervisor.launchers.fork_server.server",),
}
"""Processes that outlive a restart, by words of their command lines."""


@dataclass
class Follower:
    """What is new in a ledger."""

    path: Path
    read: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def commit(self, attempt: int) -> dict[str, Any]:
        """The first commit of that attempt or a later one."""
        end = time.monotonic() + WITHIN
        while time.monotonic() < end:
            for line in self._new():
                if line["event"] == "checkpoint_committed" and line["attempt"] >= attempt:
                    return line
            time.sleep(0.02)
        raise TimeoutError(f"no commit of attempt {attempt}")

    def _new(self) -> Iterator[dict[str, Any]]:
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self.read)
            whole = file.read().rpartition(b"\n")[0]
        self.read += len(whole)
        for line in whole.splitlines():
            if line:
                yield json.loads(line)


def ranks(cluster: Cluster, node: str) -> list[int]:
    found = cluster.machines[node].processes()
    return [pid for pid, name in found.items() if name.startswith("rank ")]


def lasting(cluster: Cluster, nodes: list[str]) -> dict[str, list[psutil.Process]]:
    """The run's processes that outlive its ranks."""
    found: dict[str, list[psutil.Process]] = {kind: [] for kind in KINDS}
    for node in nodes:
        for pid, name in cluster.machines[node].processes().items():
            if name.startswith(("rank ", "kempner-")):
                continue
            words = psutil.Process(pid).cmdline()
            for kind, wanted in KINDS.items():
                if words and "python" in words[0] and set(wanted) <= set(words):
                    found[kind].append(psutil.Process(pid))
    return {kind: _without_forks(processes) for kind, processes in found.items()}


def _without_forks(processes: list[psutil.Process]) -> list[psutil.Process]:
    """What one of them has just forked looks like it until it executes or is named."""
    pids = {process.pid for process in processes}
    return [process for process in processes if process.ppid() not in pids]


def processor(processes: list[psutil.Process]) -> float:
    return max(sum(process.cpu_times()[:2]) for process in processes)


def look(found: dict[str, list[psutil.Process]], run: Path) -> dict[str, Any]:
    """What the processes hold: of each kind the most."""
    row: dict[str, Any] = {}
    for kind, processes in found.items():
        row[f"{kind}, MiB"] = max(p.memory_full_info().uss for p in processes) / 2**20
        row[f"{kind}, descriptors"] = max(p.num_fds() for p in processes)
        row[f"{kind}, threads"] = max(p.num_threads() for p in processes)
    row["files of the run"] = sum(len(files) for _, _, files in os.walk(run))
    return row


def soak(cluster: Cluster, folder: Path, restarts: int, at: set[int]) -> Iterator[dict[str, Any]]:
    """A row for each look."""
    config, run = folder / "soak.toml", folder / "runs" / "soak"
    config.write_text(CONFIG.format(folder=folder, name="soak", interval=1))
    command = f"exec {sys.executable} -m kempner supervise {config} --launcher srun"
    cluster.sbatch(
        *("--nodes=2", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=300"),
        *(f"--output={folder / 'soak.out'}", f"--wrap={command}"),
        OMP_NUM_THREADS="1",
    )
    ledger = Follower(run / "ledger.jsonl")
    ledger.commit(1)
    found = lasting(cluster, ["node1", "node2"])
    took: list[float] = []
    used, since = {kind: processor(found[kind]) for kind in KINDS}, 0
    first: list[float] = []
    for number in range(1, restarts + 1):
        victims = ranks(cluster, "node2")
        killed = time.time()
        for pid in victims:
            os.kill(pid, 9)
        took.append(ledger.commit(number + 1)["time"] - killed)
        first += [sum(psutil.Process(pid).cpu_times()[:2]) for pid in ranks(cluster, "node1")]
        if number not in at:
            continue
        row = {"restarts": number, **look(found, run), "s to a commit": statistics.median(took)}
        for kind in ("supervisor", "agent"):
            now = processor(found[kind])
            row[f"{kind}, processor ms a restart"] = 1000 * (now - used[kind]) / (number - since)
            used[kind] = now
        row["first rank, processor ms"] = 1000 * statistics.median(first)
        took, first, since = [], [], number
        print(row, os.getloadavg()[0], flush=True)
        yield row


def main() -> None:
    """Print what was found."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--restarts", type=int, default=2000)
    parser.add_argument("--at", type=int, nargs="+", default=[10, 100, 500, 1000, 1500, 2000])
    records.add_option(parser)
    options = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    cluster = Cluster(folder / "cluster")
    try:
        cluster.up()
        write_tokens(folder)
        rows = list(soak(cluster, folder, options.restarts, set(options.at)))
    finally:
        cluster.down()
    records.result(options.record, "soak", PROVES, rows)


if __name__ == "__main__":
    main()
