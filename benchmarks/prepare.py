"""`kempner prepare` of one large text against the same tokenizer in a plain pool of processes.

    python benchmarks/prepare.py [--megabytes 100] [--rounds 3] [--workers 2] [--folder DIR]

The text is Python's own sources and what else is installed beside them, over and over, each time
with other numbers in it. A byte-pair tokenizer of 16,000 tokens is trained on its beginning. The
pool cuts the text at ends of lines into megabytes, encodes each, and writes the tokens: no
checksums, nothing durable, nothing to resume. Both take turns, in processes of their own.

Told are the processor time and the wall time of both, and the most memory that each took: the
resident sizes of all its processes added up, looked at twenty times a second.
"""

from __future__ import annotations

import argparse
import itertools
import os
import re
import shutil
import statistics
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import psutil
import tokenizers

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

_CHUNK = 2**20

Taken = tuple[float, float, int]
"""Seconds of wall time and of processor time, and the most bytes resident."""


def corpus(megabytes: int) -> Iterator[bytes]:
    """Text of that size, file after file."""
    folders = [Path(sysconfig.get_paths()[key]) for key in ("stdlib", "purelib")]
    files = sorted(path for folder in folders for path in folder.rglob("*.py"))
    left = megabytes * 1_000_000
    for turn in itertools.count():
        for path in files:
            text = path.read_bytes().decode("utf-8", errors="ignore").replace("\0", "")
            content = varied(text, turn).encode()[:left]
            yield content
            left -= len(content)
            if left <= 0:
                return


def varied(text: str, turn: int) -> str:
    """The same with other numbers."""
    return re.sub(r"\d+", lambda match: str(int(match[0][:9]) + turn), text)


def train(text: Path, path: Path) -> None:
    """A tokenizer as GPT-2 has one, with a smaller vocabulary."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=16_000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    with open(text, "rb") as file:
        sample = file.read(8_000_000).decode("utf-8", errors="ignore")
    tokenizer.train_from_iterator(sample.splitlines(keepends=True), trainer)
    tokenizer.save(str(path))


_tokenizer: tokenizers.Tokenizer


def _enter(path: str) -> None:
    global _tokenizer
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _tokenizer = tokenizers.Tokenizer.from_file(path)


def _encode(text: str, out: str, bounds: tuple[int, int]) -> int:
    start, stop = bounds
    with open(text, "rb") as file:
        file.seek(start)
        content = file.read(stop - start).decode("utf-8", errors="ignore")
    ids = _tokenizer.encode_batch_fast([content], add_special_tokens=False)[0].ids
    np.array(ids, np.uint16).tofile(f"{out}/{start}")
    return len(ids)


def plain_pool(text: Path, tokenizer: Path, out: Path, workers: int) -> None:
    """What an engineer would write first, with care for the size of the pieces."""
    out.mkdir()
    edges = [0]
    with open(text, "rb") as file:
        while edges[-1] < text.stat().st_size:
            file.seek(edges[-1] + _CHUNK)
            file.readline()
            edges.append(min(file.tell(), text.stat().st_size))
    task = partial(_encode, str(text), str(out))
    with get_context("spawn").Pool(workers, _enter, (str(tokenizer),)) as pool:
        print(sum(pool.imap_unordered(task, itertools.pairwise(edges))), "tokens")


def measure(command: list[str]) -> Taken:
    before = os.times()
    start, most = time.perf_counter(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    me = psutil.Process(process.pid)
    while process.poll() is None:
        most = max(most, _resident(me))
        time.sleep(0.05)
    wall, after = time.perf_counter() - start, os.times()
    if process.returncode:
        assert process.stderr is not None
        raise SystemExit(process.stderr.read().decode())
    spent = after.children_user + after.children_system
    return wall, spent - before.children_user - before.children_system, most


def _resident(process: psutil.Process) -> int:
    total = 0
    try:
        for each in (process, *process.children(recursive=True)):
            total += each.memory_info().rss
    except psutil.Error:  # it has ended since
        pass
    return total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--megabytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--folder", default=None, help="where to write; a temporary one otherwise")
    parser.add_argument("--pool", nargs=3, help=argparse.SUPPRESS)  # one turn of the pool
    records.add_option(parser)
    arguments = parser.parse_args()
    workers = arguments.workers
    if arguments.pool:
        text, tokenizer, out = map(Path, arguments.pool)
        plain_pool(text, tokenizer, out, workers)
        return
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        text, tokenizer, out = (Path(folder) / n for n in ("a.txt", "tokenizer.json", "out"))
        with open(text, "wb") as file:
            file.writelines(corpus(arguments.megabytes))
        train(text, tokenizer)
        python, count = [sys.executable], str(workers)
        ours = [*python, "-m", "kempner", "prepare", text, "--tokenizer", tokenizer]
        ways = {
            "plain pool": [*python, __file__, "--pool", text, tokenizer, out, "--workers", count],
            "kempner": [*ours, "--out", out, "--workers", count],
        }
        found: dict[str, list[Taken]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, command in ways.items():
                found[name].append(measure([str(part) for part in command]))
                shutil.rmtree(out)
    print(f"{arguments.megabytes} MB, {workers} workers, {arguments.rounds} rounds; medians")
    rows = [row(name, rounds, found["plain pool"]) for name, rounds in found.items()]
    proves = ("kempner/data/prepare", "kempner/data/files")
    records.result(arguments.record, "prepare", proves, rows)


def row(name: str, rounds: list[Taken], pool: list[Taken]) -> dict[str, object]:
    """Medians of seconds, the most bytes, and the speed against the pool of the same round."""
    wall, spent = (statistics.median(each[n] for each in rounds) for n in (0, 1))
    found = {"program": name, "processor s": spent, "wall s": wall}
    found["most memory, MB"] = max(each[2] for each in rounds) / 1e6
    for n, what in enumerate(("wall", "processor")):
        pairs = zip(pool, rounds, strict=True)
        found[f"speed by {what} time"] = statistics.median(a[n] / b[n] for a, b in pairs)
    return found


if __name__ == "__main__":
    main()
