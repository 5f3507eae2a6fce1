"""The processor time of a rank from its start to its first step, beside that of importing torch.

    python benchmarks/starts/rank_start.py [--ranks 1 2] [--rounds 5] [--kinds new resumed ...]

In every round, in turns: `bare`, a process that imports torch, and for more than one rank FSDP2 and
DTensor, and ends; and `kempner supervise` with its ranks, which train a model by each kind of
start: `new`, `resumed` from a checkpoint, and both with `train.compile`, where the resumed one
finds what the new one has compiled in the run's directory.

What is counted is user and system time up to the first update of the weights, with that of a
compiler, of the process whose sum is the largest, by part; `ratio` is that sum over the bare
process of the same round. `later step` is the second one: what the first one takes more is what is
done once. `wall` is seconds from exec to the first update, which other work lengthens.
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
import time
from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

PROVES = ("kempner/cli", "kempner/config", "kempner/run", "kempner/supervisor", "kempner/training")

CONFIG = """
[run]
dir = "{folder}/runs"
name = "start"
[model]
{model}
[train]
max_steps = {steps}
compile = {compiled}
global_batch_size = 8
micro_batch_size = 2
seq_len = 32
threads = 1
[data]
dataset_path = "{folder}/tokens"
"""
TINY = "dim = 32\nn_layers = 2\nn_heads = 2\nffn_dim = 64"
KINDS = {
    "new": (False, False),
    "resumed": (True, False),
    "new, compiled": (False, True),
    "resumed, compiled": (True, True),
}
"""By name: whether the run has a checkpoint, and whether its blocks are compiled."""

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
PARTS = ("python", "configuration", "torch", "kempner", "meet", "build", "load", "first step")
LATER, WALL = "later step", "wall"


class Stopwatch:
    """Processor seconds of this process, by part."""

    def __init__(self) -> None:
        self._parts: dict[str, float] = {}
        self._wall = 0.0

    def mark(self, part: str) -> None:
        """All that was used since the mark before belongs to `part`."""
        since = used() - sum(self._parts.values())
        self._parts[part] = self._parts.get(part, 0.0) + since

    def save(self) -> None:
        """Leave the figures for the benchmark."""
        path = Path(os.environ[MARKS]) / f"{os.getpid()}.json"
        path.write_text(json.dumps({**self._parts, WALL: self._wall}))

    def stop(self) -> None:
        """The first step is done."""
        self._wall = time.time() - psutil.Process().create_time()

    def around(
        self, function: Callable[..., Any], part: str, before: str | None = None
    ) -> Callable[..., Any]:
        """`function`, whose return is a mark, and its call if `before` names what ends there."""

        @wraps(function)
        def marked(*arguments: Any, **options: Any) -> Any:
            if before is not None:
                self.mark(before)
            result = function(*arguments, **options)
            self.mark(part)
            return result

        return marked


def used() -> float:
    """User and system time in seconds of this process, and of those that it has started."""
    own, others = map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + others.ru_utime + others.ru_stime


def rank(arguments: Sequence[str]) -> None:
    """`kempner train`, with marks between the parts. Its imports are made here, in its order."""
    watch = Stopwatch()
    watch.mark("python")
    from kempner.cli import entry

    gc.disable()  # as `entry` does
    from kempner.cli.app import load_command

    load_command("train")
    watch.mark("configuration")
    importlib.import_module("torch")
    watch.mark("torch")
    main = importlib.import_module("kempner.training.main")
    loop = importlib.import_module("kempner.training.loop")
    watch.mark("kempner")
    manager = importlib.import_module("kempner.checkpoint.manager").CheckpointEngine
    main.connect = watch.around(main.connect, "meet")  # type: ignore[attr-defined]
    main.build = watch.around(main.build, "build")  # type: ignore[attr-defined]
    manager.restore = watch.around(manager.restore, "load", before="build")
    update, parts = loop.update, [LATER, PARTS[-1]]

    @wraps(update)
    def marked(*given: Any, **options: Any) -> Any:
        result = update(*given, **options)
        if parts:
            watch.mark(parts.pop())
            if parts:
                watch.stop()
            else:
                watch.save()
        return result

    loop.update = marked  # type: ignore[attr-defined]
    entry.main(["train", *arguments])


def supervisor(config: str, ranks: int) -> None:
    """`kempner supervise` whose ranks are `rank`."""
    from kempner.config.loading import load
    from kempner.run.process.signals import inbox
    from kempner.run.record.run_dir import RunDirectory
    from kempner.supervisor.daemon import supervise
    from kempner.supervisor.launchers.base import Program
    from kempner.supervisor.launchers.launcher import Launcher
    from kempner.supervisor.launchers.local import this_machine

    inbox().install()
    loaded = load(Path(config), [])
    run = RunDirectory(Path(loaded.run.dir) / str(loaded.run.name))
    program = Program((sys.executable, __file__, "rank", config), ours=True)
    launcher = Launcher(*this_machine(run, ranks))
    sys.exit(supervise(run, launcher, program, loaded, inbox()))


def bare(ranks: int) -> float:
    """Processor seconds of a process that only imports, its end not counted."""
    said = subprocess.run(
        [sys.executable, "-c", BARE[ranks > 1] + SAY], check=True, capture_output=True, text=True
    )
    return float(said.stdout)


def start(ranks: int, tokens: Path, kind: str, model: str) -> dict[str, float]:
    """The parts of the most expensive rank."""
    resumed, compiled = KINDS[kind]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "tokens").symlink_to(tokens)
        for steps in (2, 4) if resumed else (2,):
            found = _attempt(folder, ranks, steps, compiled, model)
        assert len(found) == ranks
        return max(found, key=lambda parts: sum(parts[part] for part in PARTS))


def _attempt(
    folder: Path, ranks: int, steps: int, compiled: bool, model: str
) -> list[dict[str, float]]:
    """Every rank's parts in a start that trains up to a step, and commits it."""
    marks = folder / f"marks-{steps}"
    marks.mkdir()
    config = folder / f"{steps}.toml"
    config.write_text(
        CONFIG.format(folder=folder, steps=steps, compiled=str(compiled).lower(), model=model)
    )
    environment = {**os.environ, MARKS: str(marks), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "supervisor", str(config), str(ranks)]
    subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    return [json.loads(path.read_text()) for path in marks.iterdir()]


def write_tokens(folder: Path) -> None:
    """A corpus of random bytes."""
    text, source = folder / "text.txt", random.Random(0)
    text.write_text("".join(source.choices("abcdefgh ", k=40_000)))
    command = [sys.executable, "-m", "kempner", "prepare", "--tokenizer", "byte"]
    command += ["--out", str(folder / "tokens"), str(text)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def measure(
    worlds: Sequence[int], rounds: int, kinds: Sequence[str], model: str
) -> Iterator[list[dict[str, object]]]:
    """Medians for every kind of start, world after world."""
    with tempfile.TemporaryDirectory() as name:
        write_tokens(Path(name))
        for ranks in worlds:
            bares: list[float] = []
            starts: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
            for number in range(rounds):
                for what in ("bare", *kinds) if number % 2 else (*kinds, "bare"):
                    if what == "bare":
                        bares.append(bare(ranks))
                    else:
                        starts[what].append(start(ranks, Path(name) / "tokens", what, model))
            yield [{"ranks": ranks, "start": k, **row(bares, f)} for k, f in starts.items()]


def row(bares: Sequence[float], found: Sequence[dict[str, float]]) -> dict[str, object]:
    """Medians of the starts of a kind, in all and by part."""
    sums = [sum(parts[part] for part in PARTS) for parts in found]
    ratios = [whole / least for whole, least in zip(sums, bares, strict=True)]
    told: dict[str, object] = {"bare": statistics.median(bares), "rank": statistics.median(sums)}
    told |= {"ratio": statistics.median(ratios), "ratio, range": [min(ratios), max(ratios)]}
    columns = (*PARTS, LATER, WALL)
    return told | {part: statistics.median(each[part] for each in found) for part in columns}


def main() -> None:
    """Measure, or be one of the processes that are measured."""
    if sys.argv[1:2] == ["rank"]:
        rank(sys.argv[2:])
    elif sys.argv[1:2] == ["supervisor"]:
        supervisor(sys.argv[2], int(sys.argv[3]))
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--preset", help="a model by name, in place of a tiny one")
    records.add_option(parser)
    options = parser.parse_args()
    model = TINY if options.preset is None else f'preset = "{options.preset}"'
    name = options.preset or "tiny"
    for rows in measure(options.ranks, options.rounds, options.kinds, model):
        told = [{"model": name, **each} for each in rows]
        records.result(options.record, "rank start", PROVES, told, "model", "ranks", "start")


if __name__ == "__main__":
    main()
