"""What the tests share: a tiny run on a tiny corpus, real processes, and waiting for events."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import warm
from patience import scaled, wait_until
from warm import Process

from kempner.cluster.network.ports import free_port
from kempner.data.files.index import INDEX_FILE, Index, Shard, ShardSource, TokenizerIdentity
from kempner.data.files.token_file import TokenWriter
from kempner.insight.run_reader import LiveState, RunFacts
from kempner.insight.status.summary import summarise
from kempner.run.process.exit_codes import StopReason
from kempner.run.record.attempts import read_current
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import parse_lines, read_lines
from kempner.run.record.run_dir import RunDirectory

ROOT = Path(__file__).resolve().parents[1]
KEMPNER = [sys.executable, "-m", "kempner"]

PYTHON = shlex.quote(sys.executable)
"""For a line of a shell: it may stand in a folder with spaces."""

TINY = """
[run]
dir = "{dir}"
name = "run"
[model]
dim = 32
n_layers = 2
n_heads = 2
n_kv_heads = 1
ffn_dim = 64
dropout = 0.1
[train]
max_steps = 40
global_batch_size = 8
micro_batch_size = 2
seq_len = 32
threads = 1
log_samples = true
[optimizer]
lr = 3e-3
[scheduler]
warmup_steps = 5
[data]
dataset_path = "{data}"
[checkpoint]
interval = 10
"""


def drills(*cases: Any) -> list[Any]:
    """Cases of a parametrized test that only `make long` takes; `make check` has the others."""
    rows = (case if isinstance(case, tuple) else (case,) for case in cases)
    return [pytest.param(*row, marks=pytest.mark.drill) for row in rows]


LARGE_WORLD = 4
"""Ranks that keep more than two cores busy as long as they last."""


def launch(script: Path, world: int, *arguments: object, deadline: float = 100.0) -> str:
    """Run a script on some ranks, each of which says that it has seen it all; what they print."""
    dear = warm.dear() if world >= LARGE_WORLD else nullcontext()
    with dear, tempfile.TemporaryFile() as output:
        place = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1"}
        place |= {"MASTER_PORT": free_port("127.0.0.1", f"{os.getpid()} {script}")}
        # Without torchrun's id they would not believe the rest.
        common = {**os.environ, "TORCHELASTIC_RUN_ID": "none", **in_words(place)}
        command = [sys.executable, str(script), *map(str, arguments)]
        ranks = [
            warm.start(command, {**common, **in_words({"RANK": n, "LOCAL_RANK": n})}, output)
            for n in range(world)
        ]

        def codes() -> list[int | None]:
            return [rank.poll() for rank in ranks]

        try:
            wait_until(lambda: None not in codes() or any(codes()), "their end", deadline)
        finally:
            for rank in ranks:
                rank.send_signal(signal.SIGKILL)
        output.seek(0)
        printed = output.read().decode(errors="replace")
    assert codes() == [0] * world, printed
    assert printed.count("has seen it all") == world
    return printed


def python_script(text: str, *options: str) -> str:
    """A file that may be executed, of these lines; a `#!` cannot name a folder with spaces."""
    start = " ".join([PYTHON, *options])
    return f"#!/bin/sh\n'''exec' {start} \"$0\" \"$@\"\n' '''\n{text}"


def in_words(numbers: Mapping[str, object]) -> dict[str, str]:
    """Values of environment variables."""
    return {name: str(value) for name, value in numbers.items()}


def made_once(folder: Path, make: Callable[[Path], None]) -> Path:
    """`folder`, made by the worker that needs it first; the others wait until it is whole."""
    with open(folder.with_name(f"{folder.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        whole = folder / "whole"
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)  # of one that failed
            folder.mkdir()
            make(folder)
            whole.touch()
    return folder


class Clock:
    """In place of the module `time`: stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


MISTAKE = "and is not asked again"
"""What kempner says of a mistake of its own that ends no run, and a test."""


@dataclass
class Job:
    """A process of ours and what it prints."""

    process: Process
    log: Path

    def output(self) -> str:
        return self.log.read_text(errors="replace")

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def wait(self, deadline: float = 120.0) -> int:
        try:
            code = self.process.wait(scaled(deadline))
        except subprocess.TimeoutExpired:
            self.process.send_signal(signal.SIGQUIT)
            raise AssertionError(
                f"still there after {scaled(deadline):.0f} s\n{self.output()}"
            ) from None
        said = self.output()
        assert MISTAKE not in said, said
        return code


def rank_processes(job: Job) -> dict[int, psutil.Process]:
    """The ranks of a supervisor that are there now: forked ones by their name, others by RANK."""
    found = {}
    for process in psutil.Process(job.process.pid).children(recursive=True):
        with suppress(psutil.Error, ProcessLookupError):  # it may be about to come or to go
            if os.getsid(process.pid) != process.pid or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if forked := re.fullmatch(r"rank (\d+)", process.name()):
                found[int(forked[1])] = process
            elif "RANK" in (environ := process.environ()):
                found[int(environ["RANK"])] = process
    return found


@dataclass
class Run:
    """A run of the tiny configuration in a folder of its own."""

    folder: Path
    data: Path
    overrides: list[str] = field(default_factory=list)
    jobs: list[Job] = field(default_factory=list)
    name: str = "run"

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        self.config.write_text(TINY.format(dir=self.folder / "runs", data=self.data))

    @property
    def config(self) -> Path:
        return self.folder / "tiny.toml"

    @property
    def record(self) -> RunDirectory:
        return RunDirectory(self.folder / "runs" / self.name)

    @property
    def checkpoints(self) -> Path:
        return self.record.checkpoints

    def start(
        self, command: Sequence[str], *overrides: str, spare: bool = False, **environ: str
    ) -> Job:
        """Start `command CONFIG overrides` in a session of its own; `spare` as in `warm.start`."""
        log = self.folder / f"job-{len(self.jobs)}.out"
        whole = [*command, str(self.config), *self.overrides, *overrides]
        with open(log, "wb") as out:
            env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
            self.jobs.append(Job(warm.start(whole, env, out, spare=spare), log))
        return self.jobs[-1]

    def train(self, *overrides: str, **environ: str) -> Job:
        return self.start([*KEMPNER, "train"], *overrides, spare=False, **environ)

    def supervise(self, nproc: int, *overrides: str, **environ: str) -> Job:
        command = [*KEMPNER, "supervise", "--nproc", str(nproc)]
        spare = "--supervise.fork=false" not in overrides
        return self.start(command, *overrides, spare=spare, **environ)

    def complete(self, nproc: int, *overrides: str, deadline: float = 120.0) -> None:
        """Run to the end."""
        job = self.supervise(nproc, *overrides)
        assert job.wait(deadline) == 0, job.output()

    def go_on_from(self, other: Run) -> None:
        """Become a copy of another run, with all that it has saved."""
        shutil.copytree(other.folder / "runs", self.folder / "runs", symlinks=True)

    def ready_pid(self, attempt: int, rank: int, job: Job) -> int:
        """The process id of a rank, once it is about to train."""
        log = self.record.log(attempt, rank)
        ready = lambda: [e["pid"] for e in read_lines(log) if e["event"] == "ready"]  # noqa: E731
        return int(wait_until(ready, f"rank {rank} ready", job=job)[0])

    def reach(self, step: int, job: Job) -> None:
        """Wait until a step is in the metrics. Each look reads what is new, so that looks are cheap
        and many: a run may make fifty steps in a second."""
        read = 0

        def made() -> bool:
            nonlocal read
            lines, read = lines_after(self.record.metrics, read)
            return any(line["step"] >= step for line in lines if "loss" in line)

        wait_until(made, f"step {step}", job=job)

    def attempt(self) -> int:
        current = read_current(self.record.attempts)
        return current.number if current else 0

    def committed(self) -> list[int]:
        return sorted(
            int(p.name.removeprefix("step-"))
            for p in self.checkpoints.glob("step-????????")
            if (p / "manifest.json").exists()
        )

    def latest(self) -> int:
        return int(str((self.checkpoints / "latest").readlink()).removeprefix("step-"))

    def weights(self) -> dict[str, bytes]:
        """The checksums of every block of the last checkpoint's data, by file."""
        folder = self.checkpoints / f"step-{max(self.committed(), default=0):08}"
        return {path.name: path.read_bytes() for path in folder.glob("sums-*.json")}

    def metrics(self) -> Iterator[dict[str, Any]]:
        return (line for line in read_lines(self.record.metrics) if "loss" in line)

    def steps(self) -> dict[int, tuple[float, float, str | None]]:
        """Loss and gradient norm of every step, and the fingerprint of weights and moments after
        it, if it has one; the last attempt's counts."""
        return {
            line["step"]: (line["loss"], line["grad_norm"], line.get("fingerprint"))
            for line in self.metrics()
        }

    def samples(self) -> dict[int, list[int]]:
        """Global sample positions of every step over all ranks; the last attempt's count."""
        taken: dict[int, dict[int, dict[int, list[int]]]] = {}
        for path in sorted((self.record.path / "samples").glob("rank-*.jsonl")):
            for line in read_lines(path):
                by_attempt = taken.setdefault(line["step"], {})
                by_attempt.setdefault(line["attempt"], {})[line["rank"]] = line["samples"]
        return {
            step: [s for _, ids in sorted(by_attempt[max(by_attempt)].items()) for s in ids]
            for step, by_attempt in sorted(taken.items())
        }

    def taken(self) -> list[int]:
        """All of these positions, step after step."""
        return [position for step in self.samples().values() for position in step]

    def events(self, name: str) -> list[dict[str, Any]]:
        return [e for e in read_lines(self.record.ledger) if e["event"] == name]


def lines_after(file: Path, place: int) -> tuple[list[dict[str, Any]], int]:
    """The whole lines of a file of JSON beyond a place, and where they end."""
    if not file.exists():
        return [], 0
    with open(file, "rb") as source:
        source.seek(place)
        whole, newline, _ = source.read().rpartition(b"\n")
    return list(parse_lines(whole + newline)), place + len(whole) + len(newline)


def end_jobs(run: Run) -> None:
    """Kill what a failed test left behind; its ranks follow, because they watch their parent."""
    for job in run.jobs:
        if job.process.poll() is None:
            os.killpg(job.process.pid, signal.SIGKILL)
            job.process.wait()


def assert_named(
    record: RunDirectory, reason: StopReason, attempt: int, world: int, output: str
) -> None:
    """The log of every rank, the ledger, the last line for a person and `kempner status` name the
    reason of a stop, and each rank tells it once.
    """
    for rank in range(world):
        log = [e for e in read_lines(record.log(attempt, rank)) if e["event"] == "stopped"]
        assert [e["reason"] for e in log] == [reason.label], log
    until = [e for e in read_lines(record.ledger) if e["attempt"] <= attempt]
    (stopped,) = [e for e in until if (e["event"], e["attempt"]) == ("stopped", attempt)]
    assert stopped["reason"] == reason.label
    last_line = f"stopped after step {stopped['step']} ({reason.words}); start again to continue"
    assert last_line in output
    ended = [e for e in until if (e["event"], e["attempt"]) == ("attempt_ended", attempt)]
    if ended:
        said = f"stopped ({reason.words}); start again to continue"
        assert [e["reason"] for e in ended] == [said]
        asked = [e for e in until if (e["event"], e["attempt"]) == ("stop_requested", attempt)]
        # When ranks stop by themselves, the news that one has left may come before the reason.
        assert asked[-1]["reason"] in (reason.label, StopReason.PEER_STOPPED.label)
    there = [e for e in until if e["event"] != "requeued"]  # or it would be in the queue again
    assert (
        summarise(RunFacts(0.0, RunHistory(there), LiveState(alive=False))).state
        == f"stopped ({reason.words})"
    )


def manifest(checkpoint: Path) -> dict[str, Any]:
    """A manifest as plain JSON."""
    content: dict[str, Any] = json.loads((checkpoint / "manifest.json").read_text())
    return content


def write_tokens(
    directory: Path,
    shards: Sequence[Sequence[int]],
    dtype: Any = "uint16",
    vocab_size: int = 257,
) -> Index:
    """A prepared corpus with a token file, `part-<n>.tokens`, for each sequence of tokens."""
    directory.mkdir(exist_ok=True)
    listed = []
    for number, tokens in enumerate(shards):
        name = f"part-{number}.tokens"
        with TokenWriter(directory / name, dtype) as writer:
            writer.append(np.array(tokens, np.int64))
            written = writer.finish()
        listed.append(
            Shard(
                file=name,
                tokens=written.tokens,
                documents=1,
                empty_documents=0,
                bytes=written.bytes,
                checksum=written.checksum,
                source=ShardSource(first="text", files=1, digest="0" * 32),
            )
        )
    index = Index(
        format="kempner-tokens",
        version=1,
        dtype=dtype,
        vocab_size=vocab_size,
        eot=vocab_size - 1,
        tokenizer=TokenizerIdentity(kind="byte", fingerprint="byte-1"),
        tokens=sum(map(len, shards)),
        documents=len(shards),
        shards=listed,
    )
    (directory / INDEX_FILE).write_bytes(index.to_bytes())
    return index
