"""What a save costs training, beside the stock path, in copies of the state.

    pip install torch_checkpointing==0.1.1    # or leave it out with --ways
    python benchmarks/checkpoint.py [--ranks 1 2 4] [--megabytes 500] [--tensors 336] [--pairs 20]

Every figure is a ratio to a floor measured in the same run: one `torch._foreach_copy_` of a rank's
state into preallocated buffers. A pair is the same number of training steps with one save started
at the beginning, and without; the order within a pair alternates. `stopped` is the time that the
training thread spends inside the save's calls. `cost` is the wall time that a save adds to its
pair; for `nothing`, the control, both halves are without a save, and its median is subtracted.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from ways_to_save import WAYS, Nothing, Subject

from kempner.checkpoint.tensors.state import local_part

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

PROVES = ("kempner/checkpoint",)


NAMES = {"ours": "kempner", "nothing": "none (the control)", "meta": "Meta's torch_checkpointing"}
"""What the tables call a way to save, where its own name does not say it."""


def segment(way: Nothing, number: int | None, steps: int) -> tuple[float, float]:
    """Wall time and time stopped of some steps, with a save at their beginning or without."""
    dist.barrier()
    start = time.perf_counter()
    stopped = 0.0
    if number is not None:
        way.save(number)
        stopped += time.perf_counter() - start

    @contextmanager
    def timed() -> Iterator[None]:
        nonlocal stopped
        begun = time.perf_counter()
        with way.guard():
            stopped += time.perf_counter() - begun
            yield

    for _ in range(steps):
        way.subject.step(timed() if number is not None else None)
    if number is not None:
        way.join()
    return time.perf_counter() - start, stopped


def build(megabytes: int, tensors: int, folder: Path) -> Subject:
    """Square layers whose weights, biases and their moments are `tensors` of `megabytes` in all."""
    layers = max(1, tensors // 8)  # weight and bias, each with two moments and a counter
    width = max(8, round(math.sqrt(megabytes * 1e6 / (12 * layers))))
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(layers)))
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    subject = Subject(model, optimizer, dist.new_group(backend="gloo"), folder, width)
    subject.step()
    return subject


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure all modes in this process group; rank 0 prints."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    subject = build(arguments.megabytes, arguments.tensors, Path(arguments.folder))
    table = subject.state()
    buffers = [torch.empty_like(local_part(t)) for t in table.values()]
    steps = steps_for(subject, arguments.seconds)
    costs: dict[str, list[float]] = {}
    stops: dict[str, list[float]] = {}
    memory = math.nan
    for name in arguments.ways:
        way = WAYS[name](subject)
        with peak_memory() as without:
            segment(way, None, steps)
        with peak_memory() as peak:
            segment(way, 0, steps)  # plans, allocates
        if name == "ours":
            memory = peak[0] - without[0] - own_size(table)
        for pair in range(1, arguments.pairs + 1):
            subject.measure_floor(buffers)
            halves = [None, pair] if pair % 2 else [pair, None]
            walls = {half is not None: segment(way, half, steps) for half in halves}
            floor = statistics.median(subject.floor)
            costs.setdefault(name, []).append((walls[True][0] - walls[False][0]) / floor)
            stops.setdefault(name, []).append(walls[True][1] / floor)
    if dist.get_rank() == 0:
        report(arguments, subject, table, costs, stops, steps, memory)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


@contextmanager
def peak_memory() -> Iterator[list[float]]:
    """The most bytes that this process holds, looked at every few milliseconds."""
    process, done, peak = psutil.Process(), threading.Event(), [0.0]

    def watch() -> None:
        while not done.wait(0.005):
            peak[0] = max(peak[0], process.memory_info().rss)

    watcher = threading.Thread(target=watch)
    watcher.start()
    yield peak
    done.set()
    watcher.join()


def own_size(table: dict[str, torch.Tensor]) -> int:
    """Bytes of this rank's part."""
    parts = [local_part(tensor) for tensor in table.values()]
    return sum(part.numel() * part.element_size() for part in parts)


def steps_for(subject: Subject, seconds: float) -> int:
    """How many steps take about this long; the same on every rank."""
    start = time.perf_counter()
    for _ in range(3):
        subject.step()
    count = torch.tensor(max(1, round(3 * seconds / (time.perf_counter() - start))))
    dist.broadcast(count, 0)
    return int(count.item())


def report(
    arguments: argparse.Namespace,
    subject: Subject,
    table: dict[str, torch.Tensor],
    costs: dict[str, list[float]],
    stops: dict[str, list[float]],
    steps: int,
    memory: float,
) -> None:
    """A table in units of the floor; `memory` is what a save takes beyond its staging buffer."""
    size = own_size(table)
    floor = statistics.median(subject.floor)
    control = statistics.median(costs["nothing"]) if "nothing" in costs else 0.0
    print(
        f"{dist.get_world_size()} ranks, {size / 1e6:.0f} MB and {len(table)} tensors each, "
        f"{steps} steps a half, {arguments.pairs} pairs; a copy is {floor * 1e3:.0f} ms"
    )
    rows: list[dict[str, object]] = []
    for name in costs:
        shift = 0.0 if name == "nothing" else control
        low, middle, high = (q - shift for q in statistics.quantiles(costs[name], n=4))
        row = {
            "ranks": dist.get_world_size(),
            "MB a rank": size / 1e6,
            "save": NAMES.get(name, name),
        }
        row |= {"stopped": statistics.median(stops[name]), "at worst": max(stops[name])}
        row |= {"cost": middle, "quartiles of the cost": [low, high]}
        rows.append(row | ({"memory, MB": memory / 1e6} if name == "ours" else {}))
    records.result(arguments.record, "checkpoint", PROVES, rows, "ranks")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--megabytes", type=int, default=500, help="state of all ranks together")
    parser.add_argument("--tensors", type=int, default=336, help="how many tensors that is")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a half")
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--folder", default=None, help="where to write; a temporary one otherwise")
    records.add_option(parser)
    arguments = parser.parse_args()
    if "RANK" in os.environ:
        run_rank(arguments)
    for ranks in arguments.ranks:
        with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
            command += [f"--nproc-per-node={ranks}", __file__, *sys.argv[1:], "--folder", folder]
            subprocess.run(command, check=True)


if __name__ == "__main__":
    main()
