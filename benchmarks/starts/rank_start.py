"""The processor time of a rank from its start to its first step, beside that of importing torch.

    python benchmarks/starts/rank_start.py [--ranks 1 2] [--rounds 5]

In every round, in turns: `bare`, a process that imports torch, and for more than one rank FSDP2 and
DTensor, and ends; and `kempner supervise` with its ranks, which train a tiny model. What is counted
is user and system time up to the first update of the weights, of the process whose sum is the
largest, by part; `ratio` is that sum over the bare process of the same round.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

CONFIG = """
[run]
dir = "{folder}/runs"
name = "start"
[model]
dim = 32
n_layers = 2
n_heads = 2
ffn_dim = 64
[train]
max_steps = 1
global_batch_size = 8
micro_batch_size = 2
seq_len = 32
threads = 1
[data]
dataset_path = "{folder}/tokens"
"""
BARE = {
    False: "import torch",
    True: "import torch, torch.distributed\n"
    "from torch.distributed.fsdp import fully_shard\n"
    "from torch.distributed.tensor import DTensor",
}
"""What a rank needs, by whether there are others."""
SAY = """
import resource
usage = resource.getrusage(resource.RUSAGE_SELF)
print(usage.ru_utime + usage.ru_stime)
"""
MARKS = "RANK_START_MARKS"
"""Environment variable: the folder in which ranks leave their figures."""
PARTS = ("python", "command", "torch", "kempner", "meet", "build", "first step")


class Stopwatch:
    """Processor seconds of this process, by part."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}

    def mark(self, part: str) -> None:
        """All that was used since the mark before belongs to `part`."""
        self._parts[part] = used() - sum(self._parts.values())

    def save(self) -> None:
        """Leave the figures for the benchmark."""
        path = Path(os.environ[MARKS]) / f"{os.getpid()}.json"
        path.write_text(json.dumps(self._parts))

    def after(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """`function`, whose return is a mark."""

        @wraps(function)
        def marked(*arguments: Any, **options: Any) -> Any:
            result = function(*arguments, **options)
            self.mark(part)
            return result

        return marked


def used() -> float:
    """User and system time of this process in seconds."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def rank(arguments: Sequence[str]) -> None:
    """`kempner train`, with marks between the parts. Its imports are made here, in its order."""
    watch = Stopwatch()
    watch.mark("python")
    from kempner.cli import entry

    gc.disable()  # as `entry` does
    from kempner.cli.app import load_command

    load_command("train")
    watch.mark("command")
    importlib.import_module("torch")
    watch.mark("torch")
    main = importlib.import_module("kempner.training.main")
    loop = importlib.import_module("kempner.training.loop")
    watch.mark("kempner")
    main.connect = watch.after(main.connect, "meet")  # type: ignore[attr-defined]
    main.build = watch.after(main.build, "build")  # type: ignore[attr-defined]
    update, done = loop.update, []

    @wraps(update)
    def first_update(*given: Any, **options: Any) -> Any:
        result = update(*given, **options)
        if not done:
            done.append(True)
            watch.mark("first step")
            watch.save()
        return result

    loop.update = first_update  # type: ignore[attr-defined]
    entry.main(["train", *arguments])


def supervisor(config: str, ranks: int) -> None:
    """`kempner supervise` whose ranks are `rank`."""
    from kempner.config.loading import load
    from kempner.run.output import logs
    from kempner.run.process.signals import inbox
    from kempner.run.record.run_dir import RunDirectory
    from kempner.supervisor.daemon import supervise
    from kempner.supervisor.launchers.base import Program
    from kempner.supervisor.launchers.local import LocalLauncher

    inbox().install()
    logs.configure()
    loaded = load(Path(config), [])
    run = RunDirectory(Path(loaded.run.dir) / str(loaded.run.name))
    program = Program((sys.executable, __file__, "rank", config), ours=True)
    sys.exit(supervise(run, LocalLauncher(run, ranks), program, loaded, inbox()))


def bare(ranks: int) -> float:
    """Processor seconds of a process that only imports, its end not counted."""
    said = subprocess.run(
        [sys.executable, "-c", BARE[ranks > 1] + SAY], check=True, capture_output=True, text=True
    )
    return float(said.stdout)


def start(ranks: int, tokens: Path) -> dict[str, float]:
    """The parts of the most expensive rank."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").symlink_to(tokens)
        (folder / "marks").mkdir()
        config = folder / "tiny.toml"
        config.write_text(CONFIG.format(folder=folder))
        environment = {**os.environ, MARKS: str(folder / "marks"), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, __file__, "supervisor", str(config), str(ranks)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        found = [json.loads(path.read_text()) for path in (folder / "marks").iterdir()]
        assert len(found) == ranks
        return max(found, key=lambda parts: sum(parts.values()))


def write_tokens(folder: Path) -> None:
    """A corpus of random bytes."""
    text, source = folder / "text.txt", random.Random(0)
    text.write_text("".join(source.choices("abcdefgh ", k=40_000)))
    command = [sys.executable, "-m", "kempner", "prepare", "--tokenizer", "byte"]
    command += ["--out", str(folder / "tokens"), str(text)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(worlds: Sequence[int], rounds: int) -> None:
    """Print a row of medians for every world."""
    print("ranks  bare  rank  ratio (smallest, largest)  " + "  ".join(PARTS))
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name))
        for ranks in worlds:
            bares, starts = [], []
            for number in range(rounds):
                for what in ("bare", "start") if number % 2 else ("start", "bare"):
                    if what == "bare":
                        bares.append(bare(ranks))
                    else:
                        starts.append(start(ranks, Path(name) / "tokens"))
            sums = [sum(parts.values()) for parts in starts]
            ratios = [whole / least for whole, least in zip(sums, bares, strict=True)]
            print(
                f"{ranks:5}  {statistics.median(bares):4.2f}  {statistics.median(sums):4.2f}  "
                f"{statistics.median(ratios):.2f} ({min(ratios):.2f}, {max(ratios):.2f})  "
                + "  ".join(
                    f"{part} {statistics.median(parts[part] for parts in starts):.2f}"
                    for part in PARTS
                ),
                flush=True,
            )


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2:])
    elif sys.argv[1:2] == ["supervisor"]:
        supervisor(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    measure(options.ranks, options.rounds)


if __name__ == "__main__":
    main()
