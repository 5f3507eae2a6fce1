"""What a save costs training, beside the stock path, in copies of the state.

    python benchmarks/checkpoint.py [--ranks 1 2 4] [--megabytes 500] [--pairs 20]

Every figure is a ratio to a floor measured in the same run: one `torch._foreach_copy_` of a rank's
state into preallocated buffers. A pair is the same number of training steps with one save started
at the beginning, and without; the order within a pair alternates. `stopped` is the time that the
training thread spends inside the save's calls. `cost` is the wall time that a save adds to its
pair; for `nothing`, the control, both halves are without a save, and its median is subtracted.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard

from kempner.checkpoint import state
from kempner.checkpoint.manager import CheckpointManager
from kempner.checkpoint.manifest import Identity, Position
from kempner.checkpoint.state import local_part
from kempner.run import logs
from kempner.run.attempts import Fence, begin_attempt
from kempner.run.layout import RunDirectory

WIDTH = 1024
STEP_ROWS = 64


@dataclass
class Subject:
    """A model in training, and the floor of its state."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    group: dist.ProcessGroup
    folder: Path
    floor: list[float] = field(default_factory=list)

    def step(self, before_update: Callable[[], None] = lambda: None) -> None:
        """One forward, backward and update."""
        self.model(torch.ones(STEP_ROWS, WIDTH)).square().mean().backward()
        before_update()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def measure_floor(self, buffers: list[torch.Tensor]) -> None:
        """Time one copy of the state."""
        tensors = [local_part(t) for t in state.capture(self.model, self.optimizer).values()]
        start = time.perf_counter()
        torch._foreach_copy_(buffers, tensors)
        self.floor.append(time.perf_counter() - start)


class Nothing:
    """The control."""

    def __init__(self, subject: Subject) -> None:
        self.subject = subject

    def save(self, number: int) -> None:
        """Save nothing."""

    def before_update(self) -> None:
        """Nothing to wait for."""

    def join(self) -> None:
        """Nothing to wait for."""


class Ours(Nothing):
    """kempner's manager."""

    def __init__(self, subject: Subject) -> None:
        super().__init__(subject)
        record = RunDirectory(subject.folder / "ours")
        box = [begin_attempt(record) if dist.get_rank() == 0 else None]
        dist.broadcast_object_list(box, 0)
        assert box[0] is not None
        world = dist.get_world_size()
        self.manager = CheckpointManager(
            record.checkpoints,
            subject.model,
            subject.optimizer,
            identity=Identity(world, {"fsdp": world}, 0, "", {}, "", {}, {}),
            fence=Fence(record.attempts, box[0]),
            group=subject.group,
            keep_last=2,
        )

    def save(self, number: int) -> None:
        self.manager.save(Position(number))

    def before_update(self) -> None:
        self.manager.release_staging()

    def join(self) -> None:
        self.manager.join()
        assert self.manager.committed_step is not None


class StockAsync(Nothing):
    """`torch.distributed.checkpoint.async_save` as it comes, in thread mode."""

    future = None

    def save(self, number: int) -> None:
        path = self.subject.folder / f"stock-{number}"
        table = state.capture(self.subject.model, self.subject.optimizer)
        self.future = dcp.async_save(table, checkpoint_id=path, process_group=self.subject.group)
        if dist.get_rank() == 0:
            shutil.rmtree(self.subject.folder / f"stock-{number - 2}", ignore_errors=True)

    def join(self) -> None:
        if self.future is not None:
            self.future.result()


class StockSync(Nothing):
    """`torch.distributed.checkpoint.save`."""

    def save(self, number: int) -> None:
        path = self.subject.folder / f"sync-{number}"
        dcp.save(
            state.capture(self.subject.model, self.subject.optimizer),
            checkpoint_id=path,
            process_group=self.subject.group,
        )
        if dist.get_rank() == 0:
            shutil.rmtree(self.subject.folder / f"sync-{number - 2}", ignore_errors=True)


MODES = {"nothing": Nothing, "ours": Ours, "stock async": StockAsync, "stock sync": StockSync}


def segment(mode: Nothing, number: int | None, steps: int) -> tuple[float, float]:
    """Wall time and time stopped of some steps, with a save at their beginning or without."""
    dist.barrier()
    start = time.perf_counter()
    stopped = 0.0
    if number is not None:
        mode.save(number)
        stopped += time.perf_counter() - start

    def wait() -> None:
        nonlocal stopped
        begun = time.perf_counter()
        mode.before_update()
        stopped += time.perf_counter() - begun

    for _ in range(steps):
        mode.subject.step(wait if number is not None else lambda: None)
    if number is not None:
        mode.join()
    return time.perf_counter() - start, stopped


def build(megabytes: int, folder: Path) -> Subject:
    """Layers of WIDTH x WIDTH whose weights and two moments take about `megabytes` in all."""
    layers = max(1, round(megabytes * 1e6 / (12 * WIDTH * WIDTH)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
    if dist.get_world_size() > 1:
        for layer in model:
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    subject = Subject(model, optimizer, dist.new_group(backend="gloo"), folder)
    subject.step()
    return subject


def run_rank(arguments: argparse.Namespace) -> None:
    """Measure all modes in this process group; rank 0 prints."""
    torch.set_num_threads(1)
    logs.configure()
    dist.init_process_group("gloo")
    subject = build(arguments.megabytes, Path(arguments.folder))
    table = state.capture(subject.model, subject.optimizer)
    buffers = [torch.empty_like(local_part(t)) for t in table.values()]
    steps = steps_for(subject, arguments.seconds)
    costs: dict[str, list[float]] = {}
    stops: dict[str, list[float]] = {}
    for name in arguments.modes:
        mode = MODES[name](subject)
        segment(mode, 0, steps)  # plans, allocates
        for pair in range(1, arguments.pairs + 1):
            subject.measure_floor(buffers)
            halves = [None, pair] if pair % 2 else [pair, None]
            walls = {half is not None: segment(mode, half, steps) for half in halves}
            floor = statistics.median(subject.floor)
            costs.setdefault(name, []).append((walls[True][0] - walls[False][0]) / floor)
            stops.setdefault(name, []).append(walls[True][1] / floor)
    if dist.get_rank() == 0:
        report(arguments, subject, table, costs, stops, steps)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)


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
) -> None:
    """Print a table in units of the floor."""
    size = sum(local_part(t).numel() * t.element_size() for t in table.values())
    floor = statistics.median(subject.floor)
    control = statistics.median(costs["nothing"]) if "nothing" in costs else 0.0
    print(
        f"{dist.get_world_size()} ranks, {size / 1e6:.0f} MB and {len(table)} tensors each, "
        f"{steps} steps a half, {arguments.pairs} pairs; a copy is {floor * 1e3:.0f} ms"
    )
    print(f"{'':<12} {'stopped':>8} {'worst':>7} | {'cost':>7} {'quartiles':>15}  (in copies)")
    for name in costs:
        low, middle, high = statistics.quantiles(costs[name], n=4)
        shift = 0.0 if name == "nothing" else control
        spread = f"{low - shift:.2f} to {high - shift:.2f}"
        stopped = statistics.median(stops[name])
        print(
            f"{name:<12} {stopped:>8.2f} {max(stops[name]):>7.2f} | "
            f"{middle - shift:>7.2f} {spread:>15}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--megabytes", type=int, default=500, help="state of all ranks together")
    parser.add_argument("--pairs", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=4.0, help="length of a half")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=list(MODES))
    parser.add_argument("--folder", default=None, help="where to write; a temporary one otherwise")
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
