"""From the SIGKILL of a rank on eight Slurm nodes to the next step: forked by agents, or anew.

    python benchmarks/starts/restart_on_nodes.py [--nodes 8] [--rounds 1] [--kills 3]

Needs what `tests/slurm/lab.py` needs: a real Slurm cluster on this machine. In every round, in
turns: a job of `kempner supervise` with `supervise.fork=true`, and one with `false`, each killed
several times. Told are seconds from the kill to the first step and to the first step that was never
made before; medians, smallest and largest.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests" / "slurm"), str(ROOT / "tests"), str(Path(__file__).parent)]

import records  # noqa: E402
from lab import Cluster  # noqa: E402
from restart import (  # noqa: E402
    CONFIG,
    PROVES,
    SETTLED,
    first,
    lines,
    rows_of,
    wait_for,
    write_tokens,
)


def supervised(
    cluster: Cluster, folder: Path, name: str, fork: bool, nodes: int, kills: int
) -> Iterator[tuple[float, float]]:
    """Seconds to the first step and to a new step, for each kill of the last node's rank."""
    config, run = folder / f"{name}.toml", folder / "runs" / name
    config.write_text(CONFIG.format(folder=folder, name=name, interval=10))
    options = f"--launcher srun --supervise.fork={str(fork).lower()}"
    command = f"exec {sys.executable} -m kempner supervise {config} {options}"
    job = cluster.sbatch(
        *(f"--nodes={nodes}", "--ntasks-per-node=1", "--cpus-per-task=2", "--time=30"),
        *(f"--output={folder / name}.out", f"--wrap={command}"),
        OMP_NUM_THREADS="1",
    )
    metrics = run / "metrics.jsonl"
    for attempt in range(1, kills + 1):
        log = run / "attempts" / str(attempt) / "supervisor.jsonl"
        joined = wait_for(
            lambda file=log: [
                line
                for line in lines(file)
                if line["event"] == "rank connected" and line["rank"] == nodes - 1
            ]
        )
        begun = wait_for(lambda a=attempt: first(metrics, a))["step"]
        wait_for(lambda a=attempt, b=begun: first(metrics, a, b + SETTLED))
        reached, killed = lines(metrics)[-1]["step"], time.time()
        cluster.run(joined[-1]["host"], "kill", "-KILL", str(joined[-1]["pid"]))
        again = wait_for(lambda a=attempt: first(metrics, a + 1))
        reached = max(m["step"] for m in lines(metrics) if m["attempt"] <= attempt)
        new = wait_for(lambda a=attempt, r=reached: first(metrics, a + 1, r))
        yield again["time"] - killed, new["time"] - killed
    cluster.run("login1", "scancel", job)
    cluster.wait_idle()


def main() -> None:
    """Print what each way took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--nodes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--kills", type=int, default=3)
    records.add_option(parser)
    options = parser.parse_args()
    cold: list[tuple[float, float]] = []
    warm: list[tuple[float, float]] = []
    folder = Path(tempfile.mkdtemp(prefix="lab-"))
    cluster = Cluster(folder / "cluster")
    try:
        cluster.up()
        write_tokens(folder)
        for number in range(options.rounds):
            for fork, times in ((True, warm), (False, cold)):
                name = f"{'warm' if fork else 'cold'}-{number}"
                times += supervised(cluster, folder, name, fork, options.nodes, options.kills)
                print(name, [tuple(round(t, 2) for t in pair) for pair in times], flush=True)
    finally:
        cluster.down()
    rows = rows_of(warm, cold, "the first step", "the first new step")
    records.result(options.record, "restart on nodes", PROVES, rows)


if __name__ == "__main__":
    main()
