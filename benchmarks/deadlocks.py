"""How soon ranks that wait for each other for ever are named, in eight kinds of programs.

    python benchmarks/deadlocks.py [--rounds 3] [--record docs/performance.jsonl]

Each is three ranks of a program of one's own in a loop of `survive`, which go wrong in step 8. The
seconds are from the arrival of the last rank at the place where it stays, by a file that it writes
just before, to the supervisor's line in the ledger. `named` counts the rounds in which the line
says that it is a deadlock and names each line of the program at which a rank waits.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.append(str(ROOT / "tests"))

PROGRAM = """
import sys
from pathlib import Path
import torch
import torch.distributed as dist
from torch import nn
from kempner import survive

dist.init_process_group("gloo")
rank, kind = dist.get_rank(), sys.argv[1]
pairs = [dist.new_group(sorted({a, (a + 1) % 3})) for a in range(3)]
two = [dist.new_group([0, 1, 2]) for _ in range(2)]
model = nn.parallel.DistributedDataParallel(nn.Linear(1, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
x = torch.ones(1)

def here():
    Path(f"arrived-{rank}").touch()

def go_wrong():
    here()
    if kind == "different operations":
        if rank == 2:
            dist.all_reduce(x)  # place
        else:
            dist.broadcast(x, 0)  # place
    elif kind == "groups in another order":
        first, second = two if rank else two[::-1]
        dist.all_reduce(x, group=first)  # place
        dist.all_reduce(x, group=second)
    elif kind == "a circle of pairs":
        dist.all_reduce(x, group=pairs[rank])  # place
        dist.all_reduce(x, group=pairs[rank - 1])
    elif kind == "one goes on" and rank == 0:
        dist.barrier()  # place
    elif kind == "one leaves one out" and rank:
        dist.barrier()  # place
    elif kind == "one gathers while others reduce":
        if rank == 0:
            dist.all_gather([x.clone() for _ in range(3)], x)  # place
        else:
            dist.reduce(x, 0)  # place
    elif kind == "a pair of which one goes on" and rank == 0:
        dist.all_reduce(x, group=pairs[0])  # place
    elif kind == "a barrier against a backward pass" and rank == 0:
        dist.barrier()  # place

for step in survive(model, optimizer, steps=12, save_every=5, seed=2):
    optimizer.zero_grad()
    if step == 8:
        go_wrong()
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
"""

KINDS = (
    "different operations",
    "groups in another order",
    "a circle of pairs",
    "one goes on",
    "one leaves one out",
    "one gathers while others reduce",
    "a barrier against a backward pass",
    "a pair of which one goes on",
)

LONGEST = 120.0
"""Seconds after which a round is over."""


def play(kind: str, folder: Path) -> tuple[float | None, str]:
    """Seconds until it is named, None if it is not; and the words."""
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    command = [
        *(sys.executable, "-m", "kempner", "supervise", f"--run.dir={folder}", "--run.name=run"),
        *("--nproc=3", "--", sys.executable, "program.py", kind),
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with (folder / "out").open("wb") as out:
        job = subprocess.Popen(command, cwd=folder, env=environ, stdout=out, stderr=out)
    try:
        event = wait_for_hang(folder / "run" / "ledger.jsonl", job)
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait()
    if event is None:
        return None, ""
    arrived = max(path.stat().st_mtime for path in folder.glob("arrived-*"))
    return event["time"] - arrived, event["reason"]


def wait_for_hang(ledger: Path, job: subprocess.Popen[bytes]) -> dict[str, Any] | None:
    """The first line of the ledger about a hang."""
    until = time.monotonic() + LONGEST
    while time.monotonic() < until:
        over = job.poll() is not None
        lines = ledger.read_text().splitlines() if ledger.exists() else []
        events = [json.loads(line) for line in lines if '"hang"' in line]
        if found := next((event for event in events if event["event"] == "hang"), None):
            return dict(found)
        if over:
            return None
        time.sleep(0.05)
    return None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kinds", nargs="*", default=KINDS, choices=KINDS)
    records.add_option(parser)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for kind in arguments.kinds:
            folders = (Path(name) / f"{kind}-{n}" for n in range(arguments.rounds))
            played = [play(kind, folder) for folder in folders]
            for _, words in played:
                print(f"{kind}: {words}", file=sys.stderr)
            seconds = [took for took, _ in played if took is not None]
            named = sum(words.startswith("deadlock: ") for _, words in played)
            row: dict[str, Any] = {"kind": kind, "rounds": len(played), "named": named}
            if seconds:
                row["median_s"] = round(statistics.median(seconds), 1)
                row["longest_s"] = round(max(seconds), 1)
            rows.append(row)
    records.result(arguments.record, "deadlocks", ("kempner",), rows)


if __name__ == "__main__":
    import records

    main()
