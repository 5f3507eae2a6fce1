"""What all of it adds to a healthy step, beside the same loop without it.

    python benchmarks/step_overhead.py [--ranks 2 4 8] [--rounds 20] [--seconds 3]

Three programs train the same model on the same data and take turns of equal length: `kempner` is
`kempner supervise` with its ranks (vote, progress, telemetry, control channel, signal handlers,
watch over divergence and memory, the join of a staged copy); `plain` is the same sharded model,
feed, gradient, clipping and optimizer with nothing around them, and no supervisor; `control` is a
second `plain`. While one is on, every process of the others is stopped (SIGSTOP). The order changes
from round to round. `wall` and `processor time` are ratios to the `plain` of the same round; the
processor time is that of all ranks and the supervisor.

The wait for the vote is the time in `Ballot.close`, after the backward pass, on all ranks. Beside
it: a synchronous all-reduce of the same five integers at the same place, and without a step before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]
from two_loops import NAME, STORE_PORT, Result, Turn, What

from kempner.cluster.network.ports import free_port

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

PROVES = ("kempner/run", "kempner/supervisor", "kempner/training")

CONFIG = """
[run]
dir = "{folder}/runs"
name = "overhead"
[model]
dim = 128
n_layers = 5
n_heads = 4
ffn_dim = 384
[train]
max_steps = 1000000
global_batch_size = 16
micro_batch_size = {micro}
seq_len = 128
[data]
dataset_path = "{folder}/tokens"
[checkpoint]
interval = 1000000
"""
"""The size of the demo, with nothing to evaluate, and steps without end."""
PROGRAMS = ("kempner", "plain", "control")
WARM_UP = 5
"""Steps before anything is measured."""
BARE = 200
"""All-reduces alone."""


class Program:
    """One of the three, with all its processes."""

    def __init__(self, name: str, size: int, config: Path, store: Store) -> None:
        self.name, self._size, self._store, self._turns = name, size, store, 0
        command = [sys.executable, str(Path(__file__).with_name("two_loops.py"))]
        rest = [str(config), "--size", str(size)]
        if name.startswith("kempner"):
            whole = [*command, "supervisor", *rest]
            environ = {**os.environ, NAME: name}
            self._started = [psutil.Popen(whole, stdout=subprocess.DEVNULL, env=environ)]
            return
        port = str(free_port("", salt=name))
        environ = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        self._started = [
            psutil.Popen([*command, name, *rest, "--place", str(place)], env=environ)
            for place in range(size)
        ]

    def take(self, turn: Turn) -> tuple[float, float, list[Result]]:
        """Wall and processor time of a turn, in seconds, and what each rank says of it."""
        self._signal(signal.SIGCONT)
        before = self._supervisor_time()
        self._say(asdict(turn))
        keys = [f"{self.name}/{self._turns}/{rank}" for rank in range(self._size)]
        while not self._store.check(keys):
            self._make_sure_that_it_runs()
            time.sleep(0.1)
        self._turns += 1
        results = [Result(**json.loads(self._store.get(key))) for key in keys]
        busy = sum(result.busy for result in results) + self._supervisor_time() - before
        self._signal(signal.SIGSTOP)
        return max(result.wall for result in results), busy, results

    def end(self) -> None:
        """Let it end by itself."""
        self._signal(signal.SIGCONT)
        self._say(None)
        for process in self._started:
            process.wait(60)

    def kill(self) -> None:
        """End whatever is left."""
        self._signal(signal.SIGKILL)

    def _say(self, what: object) -> None:
        self._store.set(f"{self.name}/{self._turns}", json.dumps(what))

    def _supervisor_time(self) -> float:
        if not self.name.startswith("kempner"):
            return 0.0
        times = self._started[0].cpu_times()
        return float(times.user + times.system)

    def _make_sure_that_it_runs(self) -> None:
        for process in self._started:
            if process.poll() is not None:
                raise SystemExit(f"{self.name} ended with {process.returncode} before its turn did")

    def _signal(self, number: signal.Signals) -> None:
        for process in self._started:
            if process.poll() is None:
                for one in [process, *process.children(recursive=True)]:
                    one.send_signal(number)


@dataclass
class Measured:
    """Seconds of each turn, by program; and of each wait for the vote, and for an all-reduce at its
    place and in a row."""

    steps: int
    walls: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PROGRAMS})
    busy: dict[str, list[float]] = field(default_factory=lambda: {name: [] for name in PROGRAMS})
    votes: list[float] = field(default_factory=list)
    in_place: list[float] = field(default_factory=list)
    in_a_row: list[float] = field(default_factory=list)


def measure(size: int, rounds: int, seconds: float, config: Path) -> Measured:
    """Let the three take turns of about `seconds`, in worlds of `size`."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ[STORE_PORT] = str(store.port)
    programs: dict[str, Program] = {}
    try:
        for name in PROGRAMS:
            programs[name] = Program(name, size, config, store)
            programs[name].take(Turn(WARM_UP))
        wall, _, _ = programs["plain"].take(Turn(WARM_UP))
        measured = compete(programs, rounds, max(2, round(seconds * WARM_UP / wall)))
        for program in programs.values():
            program.end()
    finally:
        for program in programs.values():
            program.kill()
    return measured


def compete(programs: dict[str, Program], rounds: int, steps: int) -> Measured:
    """The turns of all rounds, and the all-reduces after them."""
    measured = Measured(steps)
    for number in range(rounds):
        for name in random.Random(number).sample(PROGRAMS, len(PROGRAMS)):
            wall, busy, results = programs[name].take(Turn(steps))
            measured.walls[name].append(wall)
            measured.busy[name].append(busy)
            measured.votes += [wait for result in results for wait in result.waits]
    for turn, into in (
        (Turn(4 * steps, What.REDUCED), measured.in_place),
        (Turn(BARE, What.REDUCTIONS), measured.in_a_row),
    ):
        _, _, results = programs["control"].take(turn)
        into += [wait for result in results for wait in result.waits]
    return measured


def row_of(size: int, measured: Measured) -> dict[str, object]:
    walls, busy = measured.walls, measured.busy
    took = statistics.median(walls["plain"]) / measured.steps
    row: dict[str, object] = {"ranks": size, "a step, ms": 1e3 * took}
    row |= against("wall", ratios(walls["kempner"], walls["plain"]))
    row |= against("control, wall", ratios(walls["control"], walls["plain"]))
    row |= against("processor time", ratios(busy["kempner"], busy["plain"]))
    row["vote, µs"] = 1e6 * statistics.median(measured.votes)
    row["vote, p95, µs"] = 1e6 * statistics.quantiles(measured.votes, n=20)[-1]
    row["all-reduce there, µs"] = 1e6 * statistics.median(measured.in_place)
    row["all-reduces in a row, µs"] = 1e6 * statistics.median(measured.in_a_row)
    return row


def against(name: str, values: Sequence[float]) -> dict[str, object]:
    """Median and quartiles of ratios, as columns."""
    low, middle, high = statistics.quantiles(values, n=4)
    return {name: middle, f"{name}, quartiles": [low, high]}


def ratios(ours: Sequence[float], plain: Sequence[float]) -> list[float]:
    """Round by round."""
    return [one / other for one, other in zip(ours, plain, strict=True)]


def prepare(folder: Path, size: int) -> Path:
    """A corpus, and a configuration over it for `size` ranks."""
    text = folder / "text.txt"
    text.write_text("\n".join(f"line {n} of {n * n % 977}" for n in range(50_000)))
    kempner = [sys.executable, "-m", "kempner"]
    subprocess.run([*kempner, "prepare", "--out", folder / "tokens", text], check=True)
    config = folder / "config.toml"
    config.write_text(CONFIG.format(folder=folder, micro=16 // size))
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seconds", type=float, default=3.0, help="length of a turn")
    records.add_option(parser)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # or the programs would stay
    for size in arguments.ranks:
        with tempfile.TemporaryDirectory() as folder:
            config = prepare(Path(folder), size)
            found = row_of(size, measure(size, arguments.rounds, arguments.seconds, config))
            records.result(arguments.record, "step overhead", PROVES, [found], "ranks")


if __name__ == "__main__":
    main()
