"""How long a stop and a restart take under Slurm, on the tests' cluster of eight nodes.

    python benchmarks/stops.py [--stops 20] [--nodes 2]      (as root, with Slurm installed)

One job is warned again and again as `--signal=B:SIGTERM` warns it, saves, goes back into the queue
and goes on. Printed are the times from the signal to the durable checkpoint, beside what cannot be
beaten (the step under way, and a raw write and fsync of the same bytes); from the decision to
requeue to the first new step, split; and what was lost or repeated.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "tests" / "slurm")]

import records  # noqa: E402
from harness import wait_until  # noqa: E402
from submitting import Project, project_on_a_cluster  # noqa: E402

from kempner.run.record.ledger import read_lines  # noqa: E402

PROVES = ("kempner/cluster", "kempner/run", "kempner/supervisor", "kempner/training")
LONG = ["--train.max_steps=1000000", "--checkpoint.interval=1000000", "--train.log_samples=true"]


def stop_again_and_again(project: Project, stops: int, nodes: int) -> None:
    """Submit a job and warn it `stops` times, each time after some new steps."""
    job = project.train(*LONG, nodes=nodes)
    for number in range(stops + 1):
        step = max(project.run.steps(), default=0) + 10
        project.reach(job, step, deadline=300)
        if number == stops:
            break
        project.cluster.run("login1", "scancel", "--batch", "--signal=TERM", job)
        seen = lambda: project.cluster.job(job)["Restarts"] == str(number + 1)  # noqa: B023, E731
        wait_until(seen, f"restart {number + 1}", 120)
        print(f"stop {number + 1} of {stops}", flush=True)
    project.cluster.run("login1", "scancel", job)
    project.cluster.wait_for(job, "CANCELLED")


def raw_write(folder: Path, size: int) -> float:
    """Seconds of a write and fsync of `size` bytes."""
    content, path = os.urandom(size), folder / "raw"
    start = time.perf_counter()
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    took = time.perf_counter() - start
    path.unlink()
    return took


def times(events: Iterable[dict[str, Any]], name: str) -> dict[int, float]:
    """When each attempt had its first event of that name."""
    found: dict[int, float] = {}
    for event in events:
        if event["event"] == name:
            found.setdefault(event["attempt"], event["time"])
    return found


def measured(project: Project, stops: int) -> list[dict[str, object]]:
    """Seconds of each part of a stop and of a return, and what was lost."""
    events = list(read_lines(project.run.record.ledger))
    stop, commit = times(events, "stop_requested"), times(events, "checkpoint_committed")
    requeue, start = times(events, "requeued"), times(events, "attempt_started")
    lines = list(project.run.metrics())
    first: dict[int, float] = {}
    for line in lines:
        first.setdefault(line["attempt"], line["time"])
    steps = [b["time"] - a["time"] for a, b in pairwise(lines) if a["attempt"] == b["attempt"]]
    size = next(e["bytes"] for e in events if e["event"] == "checkpoint_committed")
    floor = statistics.median(steps) + statistics.median(
        raw_write(project.folder, size) for _ in range(20)
    )
    ranks = {n: ready(project, n) for n in start if n > 1}
    whole = {
        "signal to durable checkpoint": [commit[n] - stop[n] for n in requeue],
        f"one step and one raw write of the same {size / 1e6:.1f} MB": [floor],
        "decision to requeue until the first new step": [
            first[n + 1] - requeue[n] for n in requeue
        ],
    }
    parts = {
        "Slurm's wait": [start[n + 1] - requeue[n] for n in requeue],
        "srun, Python up": [joined(project, n) - start[n] for n in ranks],
        "import of torch": [r["rendezvous"] for r in ranks.values()],
        "rendezvous": [r["load"] - r["rendezvous"] for r in ranks.values()],
        "build and load": [r["step"] - r["load"] for r in ranks.values()],
        "first step": [first[n] - joined(project, n) - r["step"] for n, r in ranks.items()],
    }
    made = [line["step"] for line in lines]
    taken = [sample for step in project.run.samples().values() for sample in step]
    assert len(requeue) == stops
    lost = {
        "steps made again": len(made) - len(set(made)),
        "samples repeated": len(taken) - len(set(taken)),
        "samples missed": max(taken) + 1 - len(set(taken)),
    }
    return [
        *(row(what, "whole", seconds) for what, seconds in whole.items()),
        *(row(what, "part", seconds) for what, seconds in parts.items()),
        *({"what": what, "kind": "lost", "median": count} for what, count in lost.items()),
    ]


def ready(project: Project, attempt: int) -> dict[str, float]:
    """When rank 0 reached each phase, in seconds since it joined."""
    entries = read_lines(project.run.record.log(attempt, 0))
    reached: dict[str, float] = next(e["reached"] for e in entries if e["event"] == "ready")
    return reached


def joined(project: Project, attempt: int) -> float:
    """When rank 0 joined, in seconds since the epoch."""
    entries = read_lines(project.run.record.supervisor_log(attempt))
    seen = (e for e in entries if e["event"] == "joined" and e["rank"] == 0)
    return datetime.fromisoformat(next(seen)["timestamp"]).timestamp()


def row(what: str, kind: str, seconds: Sequence[float]) -> dict[str, object]:
    """Median and 95th percentile."""
    ordered = sorted(seconds)
    high = ordered[min(len(ordered) - 1, round(0.95 * (len(ordered) - 1)))]
    return {"what": what, "kind": kind, "median": statistics.median(ordered), "p95": high}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stops", type=int, default=20)
    parser.add_argument("--nodes", type=int, default=2)
    records.add_option(parser)
    arguments = parser.parse_args()
    with project_on_a_cluster() as project:
        stop_again_and_again(project, arguments.stops, arguments.nodes)
        records.result(arguments.record, "stops", PROVES, measured(project, arguments.stops))


if __name__ == "__main__":
    main()
