"""How long `kempner status` and `kempner report` take for a large run: a generated one.

    python benchmarks/reports/large_run.py [--ranks 16384] [--events 100000] [--lines 1000000]

Prints for each command its seconds, by the clock and of the processor, and its largest memory.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from kempner.run.control.heartbeat import describe_places
from kempner.run.control.protocol import Phase, Report
from kempner.run.record.attempts import CURRENT
from kempner.run.record.lease import Lease
from kempner.run.record.run_dir import RunDirectory

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=16_384)
    parser.add_argument("--events", type=int, default=100_000)
    parser.add_argument("--lines", type=int, default=1_000_000)
    parser.add_argument("--attempts", type=int, default=60)
    parser.add_argument("--out", type=Path)
    records.add_option(parser)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = given.out or Path(folder) / "large"
        generate(run, given.ranks, given.events, given.lines, given.attempts)
        page = run / "report.html"
        rows = [measure("status", str(run)) for _ in range(3)][-1:]
        rows.append(measure("status", str(run), "--json"))
        report = measure("report", str(run), "--output", str(page))
        rows.append(report | {"page, MB": page.stat().st_size / 1e6})
    sizes = {"ranks": given.ranks, "events": given.events, "lines of metrics": given.lines}
    proves = ("kempner/insight", "kempner/run/record")
    records.result(given.record, "large run", proves, [row | sizes for row in rows])


def measure(*arguments: str) -> dict[str, object]:
    """Run a command of kempner's; what it took."""
    began = time.monotonic()
    command = [sys.executable, "-m", "kempner", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    _, status, used = os.wait4(process.pid, 0)
    took, processor = time.monotonic() - began, used.ru_utime + used.ru_stime
    assert status == 0
    words = " ".join(word for word in arguments if not word.startswith("/"))
    found = {"command of kempner": words, "wall s": took, "processor s": processor}
    return {**found, "MiB": used.ru_maxrss >> 10}


def generate(run: Path, ranks: int, events: int, lines: int, attempts: int) -> None:
    """A run of `attempts` attempts. A rank's failure ends each but the last; this process seems to
    supervise that one.
    """
    rng, now, step, number = random.Random(0), 1.7e9, 0, 0
    run.mkdir(parents=True)
    exits = {str(rank): 76 for rank in range(ranks)}
    nodes = f"node[0001-{ranks // 8:04d}]"
    with (run / "ledger.jsonl").open("w") as ledger, (run / "metrics.jsonl").open("w") as metrics:

        def tell(event: str, **fields: object) -> None:
            head = {"schema": 1, "time": round(now, 3), "event": event, "attempt": number}
            ledger.write(json.dumps({**head, **fields}) + "\n")

        while True:
            number += 1
            tell("attempt_started", ranks=ranks, job="1", restarts=0, nodes=nodes)
            now += rng.uniform(40, 90)
            reached = {"rendezvous": 20.0, "load": 24.0, "compile": 38.0}
            tell("ready_to_train", step=step, device="cuda:0", reached=reached)
            for n in range(lines // attempts):
                now += 5 * rng.lognormvariate(0, 0.02)
                step += 1
                entry = {"step": step, "attempt": number, "loss": 2 + rng.random()}
                entry |= {"grad_norm": rng.random(), "lr": 3e-4, "tokens": step * 16_777_216}
                entry |= {"tokens_per_second": 3.3e6, "mfu": 0.41, "save_seconds": 0.0}
                metrics.write(json.dumps({**entry, "time": round(now, 3)}) + "\n")
                if n % max(1, lines // events) == 0:
                    took = {"stage_seconds": 0.4, "write_seconds": 20.0, "commit_seconds": 0.3}
                    tell("checkpoint_committed", step=step, bytes=10**12, **took)
            if number == attempts:
                break
            now += rng.uniform(1, 20)
            rank = rng.randrange(ranks)
            told = {"reason": f"rank {rank} was killed by SIGKILL", "culprit": rank}
            tell("attempt_ended", code=1, **told, exits=exits, seconds=2.0)
            node = f"node{rank // 8 + 1:04d}"
            at, saved = {"step": step + 1, "raised": "", "node": node}, max(0, step - 20)
            tell("attempt_failed", **at, node_lost=True, committed=saved)
            tell("restarting", reason="again")
            step, now = max(0, step - rng.randrange(20)), now + 1
    pretend_to_run(RunDirectory(run), number, step, ranks)


def pretend_to_run(run: RunDirectory, attempt: int, step: int, ranks: int) -> None:
    """As if this process were the supervisor of ranks that have made `step`."""
    run.attempt(attempt).mkdir(parents=True)
    (run.attempts / CURRENT).write_text(json.dumps({"attempt": attempt, "nonce": "0"}))
    run.config.write_text(f"[train]\nmax_steps = {2 * step}\n")
    places = [Report(step - rank % 2, Phase.STEP, 4000.0, 500.0) for rank in range(ranks)]
    run.ranks(attempt).write_text(describe_places(dict(enumerate(places))))
    Lease.acquire(run, lasts=45.0)


if __name__ == "__main__":
    main()
