"""What `survive` costs a plain loop, in steps that save nothing.

    python benchmarks/programs/survive_cost.py [--rounds 15] [--steps 40] [--width 256]

A loop over `survive` and the same loop over `range`, each in a process of its own with one thread,
train in turns, one after the other in each round. A ratio is that of two turns of one round, so
that what else the machine does touches both alike.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

LOOPS = ("plain", "survive")


def take_turns(loop: str, width: int, steps: int) -> None:
    """Answer each line on stdin with the seconds of processor and of wall that a step takes."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layers = [nn.Linear(width, width) for _ in range(8)]
    model = nn.Sequential(*(part for layer in layers for part in (layer, nn.Tanh())))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    numbers: Iterable[int] = itertools.count(1)
    if loop == "survive":
        from kempner import survive

        folder = tempfile.mkdtemp(prefix="survive-cost-")
        run, endless = f"{folder}/run", 10**9
        numbers = survive(model, optimizer, steps=endless, save_every=endless, run_dir=run)
    began = None
    for step in numbers:
        loss = model(torch.rand(64, width)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % steps:
            continue
        now = time.process_time(), time.perf_counter()
        if began is not None:
            print(*((b - a) / steps for a, b in zip(began, now, strict=True)), flush=True)
        if not sys.stdin.readline():
            os._exit(0)
        began = time.process_time(), time.perf_counter()


def main() -> None:
    """Print a table; or take turns, with `--loop`."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--loop", choices=LOOPS)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--width", type=int, default=256)
    records.add_option(parser)
    args = parser.parse_args()
    if args.loop:
        take_turns(args.loop, args.width, args.steps)
        return
    command = [sys.executable, __file__, f"--steps={args.steps}", f"--width={args.width}"]
    processes = {
        loop: subprocess.Popen(
            [*command, "--loop", loop], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for loop in LOOPS
    }
    turns: dict[str, list[tuple[float, float]]] = {loop: [] for loop in LOOPS}
    for _ in range(args.rounds):
        for loop, process in processes.items():
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write("\n")
            process.stdin.flush()
            while not (line := process.stdout.readline().split())[:1]:
                raise SystemExit("a loop has ended; its words are above")
            turns[loop].append((float(line[0]), float(line[1])))
    for process in processes.values():
        assert process.stdin is not None
        process.stdin.close()
        process.wait()
    rows = []
    for at, kind in enumerate(("processor time", "wall")):
        plain, ours = ([turn[at] for turn in turns[loop]] for loop in LOOPS)
        low, middle, high = statistics.quantiles(
            [b / a for a, b in zip(plain, ours, strict=True)], n=4
        )
        row = {"by": kind, "plain step, ms": statistics.median(plain) * 1e3}
        row |= {"under survive, ms": statistics.median(ours) * 1e3, "ratio": middle}
        rows.append(row | {"quartiles": [low, high], "load": os.getloadavg()[0]})
    records.result(args.record, "survive", ("kempner/training",), rows)


if __name__ == "__main__":
    main()
