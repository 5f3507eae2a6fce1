"""What it costs a program to print a gigabyte on each of two ranks, beside printing to a file.

    python benchmarks/programs/printed.py [--rounds 5] [--megabytes 1000]

Each rank multiplies matrices and prints between two steps, in lines of a hundred bytes. It does so
without kempner, with its output in a file; under kempner, which keeps what it prints and shows that
of rank 0 in a file; and there without a word. The three take turns in each round, and a ratio is
that of two turns of one round. `kept_MB` is what the run's folder has of a rank in the end,
`reader_MB` the most memory that a process that reads an output has for itself, `reader_s` the most
processor time of one.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

PROGRAM = """
import os, sys, time
import numpy as np
rank, megabytes = os.environ["RANK"], int(sys.argv[1])
lines = b"".join(b"step %08d loss 0.123456789 %s\\n" % (n, b"x" * 70) for n in range(10_000))
lines = lines[:1_000_000]
matrix, begun = np.random.rand(384, 384), None
for step in range(101):
    if step == 1:
        begun = time.perf_counter()
    for _ in range(6):
        matrix @ matrix
    for _ in range(megabytes // 100 if step else 0):
        at = 0
        while at < len(lines):
            at += os.write(1, lines[at : at + 65536])
with open(f"took-{rank}", "w") as file:
    file.write(str(time.perf_counter() - begun))
"""
WAYS = ("file", "kempner", "silent")


def take_turn(way: str, megabytes: int, folder: Path) -> dict[str, float]:
    """The seconds of the slower rank; and what is kept, under kempner."""
    folder.mkdir()
    (folder / "prints.py").write_text(PROGRAM)
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    program = [sys.executable, "prints.py", str(0 if way == "silent" else megabytes)]
    if way == "file":
        return _without(program, folder, environ)
    command = [sys.executable, "-m", "kempner", "supervise", "--run.name=run", "--nproc=2"]
    with (folder / "out").open("wb") as out:
        job = subprocess.Popen([*command, "--", *program], cwd=folder, env=environ, stdout=out)
        readers = _watch(job.pid)
        if job.wait():
            raise SystemExit(f"kempner supervise has exited with {job.returncode}")
    kept = [path.stat().st_size for path in folder.glob("runs/run/attempts/1/rank-*.out")]
    return {
        "seconds": _slower(folder),
        "kept_MB": max([0, *kept]) / 1e6,
        "reader_MB": max(memory for memory, _ in readers) / 1e6,
        "reader_s": max(seconds for _, seconds in readers),
    }


def _without(program: list[str], folder: Path, environ: Mapping[str, str]) -> dict[str, float]:
    started = []
    for rank in ("0", "1"):
        with (folder / f"out-{rank}").open("wb") as out:
            ranked = {**environ, "RANK": rank}
            started.append(subprocess.Popen(program, cwd=folder, env=ranked, stdout=out))
    for process in started:
        process.wait()
    return {"seconds": _slower(folder)}


def _watch(supervisor: int) -> list[tuple[int, float]]:
    """The memory of its own and the processor time that each look has found in a reader, until the
    supervisor ends."""
    found, process = [(0, 0.0)], psutil.Process(supervisor)

    def look() -> None:
        ours = process.cmdline()
        while psutil.pid_exists(supervisor) and process.status() != psutil.STATUS_ZOMBIE:
            with suppress(psutil.Error):
                readers = [child for child in process.children() if child.cmdline() == ours]
                found.extend(
                    (reader.memory_full_info().uss, sum(reader.cpu_times()[:2]))
                    for reader in readers
                )
            over.wait(0.2)

    over = threading.Event()
    threading.Thread(target=look, daemon=True).start()
    return found


def _slower(folder: Path) -> float:
    return max(float((folder / f"took-{rank}").read_text()) for rank in (0, 1))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--megabytes", type=int, default=1000)
    records.add_option(parser)
    arguments = parser.parse_args()
    turns: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    load = os.getloadavg()[0]
    for number in range(arguments.rounds):
        for way in WAYS[number % 3 :] + WAYS[: number % 3]:
            with tempfile.TemporaryDirectory() as name:
                turn = take_turn(way, arguments.megabytes, Path(name) / way)
            print(f"{way}: {turn}", file=sys.stderr, flush=True)
            turns[way].append(turn)
    rows = []
    for way in WAYS:
        ratios = [
            a["seconds"] / b["seconds"] for a, b in zip(turns[way], turns["file"], strict=True)
        ]
        row: dict[str, object] = {
            "way": way,
            "MB a rank": 0 if way == "silent" else arguments.megabytes,
        }
        row["load before"] = round(load, 1)
        row["seconds"] = round(statistics.median(turn["seconds"] for turn in turns[way]), 2)
        row["to a file's"] = round(statistics.median(ratios), 3)
        row["from, to"] = [round(min(ratios), 3), round(max(ratios), 3)]
        for what in ("kept_MB", "reader_MB", "reader_s"):
            if most := max((turn[what] for turn in turns[way] if what in turn), default=0.0):
                row[what] = round(most, 2)
        rows.append(row)
    records.result(arguments.record, "printed", ("kempner",), rows)


if __name__ == "__main__":
    main()
