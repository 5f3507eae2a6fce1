"""From the SIGKILL of a rank to the next step: forked ranks, ranks started anew, a bare script.

    python benchmarks/starts/restart.py [--ranks 4] [--rounds 3] [--kills 3]

In every round, in turns: `kempner supervise` of a tiny model with `supervise.fork=true` and with
`false`, each killed several times; and a bare script that has imported the same, forks as many
processes, has them meet, shard a model of that size and take a step, kills one of them and the
others, and does all of it again. Told are seconds from the kill to the first step and to the first
step that was never made before, and the processor seconds of the killed rank's successor until
then; medians, smallest and largest.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import psutil
from rank_start import write_tokens

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

PROVES = ("kempner/cluster", "kempner/run", "kempner/supervisor", "kempner/training")

CONFIG = """
[run]
dir = "{folder}/runs"
name = "{name}"
[model]
dim = 32
n_layers = 2
n_heads = 2
ffn_dim = 64
[train]
max_steps = 1_000_000
global_batch_size = 8
micro_batch_size = 2
seq_len = 32
threads = 1
[data]
dataset_path = "{folder}/tokens"
[checkpoint]
interval = {interval}
"""
SETTLED = 15
"""Steps that an attempt makes before the next kill: the first commit is done by then."""

WITHIN = 120.0
"""Seconds that anything may take."""


def lines(path: Path) -> list[dict[str, Any]]:
    """The complete lines of a file of JSON."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]


def wait_for(look: Any) -> Any:
    """What `look` finds, as soon as it finds anything."""
    end = time.monotonic() + WITHIN
    while not (found := look()):
        if time.monotonic() > end:
            raise TimeoutError("nothing happened")
        time.sleep(0.01)
    return found


def first(path: Path, attempt: int, step: int = 0) -> dict[str, Any] | None:
    """The first line about a step after `step` in that attempt or a later one."""
    found = (m for m in lines(path) if m["attempt"] >= attempt and m["step"] > step)
    return next(found, None)


def rank_pid(run: Path, attempt: int, rank: int) -> int | None:
    """The process of a rank, once it is ready."""
    log = lines(run / "attempts" / str(attempt) / f"rank-{rank:05}.jsonl")
    return next((line["pid"] for line in log if line["event"] == "ready"), None)


def supervised(folder: Path, name: str, fork: bool, ranks: int, kills: int) -> Iterator[Any]:
    """Seconds to the first step, to a new step, and of processor time, for each kill."""
    config, run = folder / f"{name}.toml", folder / "runs" / name
    config.write_text(CONFIG.format(interval=10, folder=folder, name=name))
    options = [f"--nproc={ranks}", f"--supervise.fork={str(fork).lower()}"]
    command = [sys.executable, "-m", "kempner", "supervise", str(config), *options]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=environ, **quiet)  # type: ignore[call-overload]
    metrics = run / "metrics.jsonl"
    for attempt in range(1, kills + 1):
        victim = wait_for(lambda a=attempt: rank_pid(run, a, ranks - 1))
        begun = wait_for(lambda a=attempt: first(metrics, a))["step"]
        reached = wait_for(lambda a=attempt, b=begun: first(metrics, a, b + SETTLED))["step"]
        reached = max(reached, lines(metrics)[-1]["step"])
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        again = wait_for(lambda a=attempt: first(metrics, a + 1))
        successor = wait_for(lambda a=attempt: rank_pid(run, a + 1, ranks - 1))
        used = sum(psutil.Process(successor).cpu_times()[:2])
        new = wait_for(lambda a=attempt, r=reached: first(metrics, a + 1, r))
        yield again["time"] - killed, new["time"] - killed, used
    process.send_signal(signal.SIGTERM)
    process.wait(WITHIN)


def bare(ranks: int, kills: int) -> list[float]:
    """Seconds from a kill to the first step of the bare script, for each kill."""
    command = [sys.executable, __file__, "bare", str(ranks), str(kills)]
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environ, check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.split()]


def bare_script(ranks: int, kills: int) -> None:
    """Import, fork, kill and fork again; prints the seconds of each kill."""
    import torch._dynamo
    import torch.distributed.fsdp
    import torch.distributed.tensor  # noqa: F401

    killed = 0.0
    for generation in range(kills + 1):
        with socket.create_server(("127.0.0.1", 0)) as probe:
            port = probe.getsockname()[1]
        reader, writer = os.pipe()
        children = [os.fork() or bare_rank(rank, ranks, port, writer) for rank in range(ranks)]
        os.close(writer)
        os.read(reader, 1)
        if generation:
            print(time.time() - killed, flush=True)
        killed = time.time()
        for child in reversed(children):
            os.kill(child, signal.SIGKILL)
        for child in children:
            os.waitpid(child, 0)
        os.close(reader)


def bare_rank(rank: int, ranks: int, port: int, writer: int) -> int:
    """Meet, shard, take a step, say so and wait."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, ranks, is_master=rank == 0)  # type: ignore[attr-defined]
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    width, layers = 32, 2
    model = torch.nn.Sequential(
        torch.nn.Embedding(257, width),
        *(torch.nn.TransformerEncoderLayer(width, 2, 64, batch_first=True) for _ in range(layers)),
        torch.nn.Linear(width, 257),
    )
    for block in model:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.zeros(2, 32, dtype=torch.int64)
    model(tokens).sum().backward()
    optimizer.step()
    dist.barrier()
    if rank == 0:
        os.write(writer, b".")
    signal.pause()
    return 0


def rows_of(
    warm: Sequence[Sequence[float]], cold: Sequence[Sequence[float]], *names: str
) -> list[dict[str, Any]]:
    """Of each column: median, smallest and largest of forked ranks and of those started anew."""
    rows = []
    for column, name in enumerate(names):
        row: dict[str, Any] = {"s from a kill to": name}
        for way, found in (("forked", warm), ("anew", cold)):
            values = [times[column] for times in found]
            row |= {way: statistics.median(values), f"{way}, range": [min(values), max(values)]}
        rows.append(row | {"anew, to forked": row["anew"] / row["forked"]})
    return rows


def measure(ranks: int, rounds: int, kills: int) -> list[dict[str, Any]]:
    """What each way took."""
    cold: list[tuple[float, float, float]] = []
    warm: list[tuple[float, float, float]] = []
    plain: list[list[float]] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder)
        for number in range(rounds):
            warm += supervised(folder, f"warm-{number}", True, ranks, kills)
            plain.append(bare(ranks, kills))
            cold += supervised(folder, f"cold-{number}", False, ranks, kills)
    bares = list(chain.from_iterable(plain))
    rows = rows_of(
        warm, cold, "the first step", "the first new step", "then, processor s of a rank"
    )
    middle = statistics.median(bares)
    rows[0] |= {"bare script": middle, "forked, to bare": rows[0]["forked"] / middle}
    return rows


def main() -> None:
    """Measure, or be the bare script."""
    if sys.argv[1:2] == ["bare"]:
        bare_script(int(sys.argv[2]), int(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--kills", type=int, default=3)
    records.add_option(parser)
    options = parser.parse_args()
    rows = measure(options.ranks, options.rounds, options.kills)
    records.result(options.record, "restart", PROVES, rows)


if __name__ == "__main__":
    main()
