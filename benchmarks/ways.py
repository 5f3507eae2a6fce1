"""How many functions and files of kempner an event passes through on its way.

    python benchmarks/ways.py [--list FOLDER] [--record docs/performance.jsonl]

A tiny run is played with `sys.setprofile` in every thread of the process that is looked at:

- one step of one rank: of two that `kempner train` makes, from a line of its metrics to the next;
- a SIGTERM to the supervisor's exit;
- a rank's death to the next start: until the ledger has the next attempt.

Counted are the functions that are called at least once on the way, lambdas and comprehensions not,
and the files that they are in; of the steps, the median. `--list` writes a page per way, with its
functions by file. The look makes everything slower, so times are not reported.
"""

from __future__ import annotations

import argparse
import atexit
import os
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

ROOT = Path(__file__).resolve().parents[1]
if TYPE_CHECKING:
    from harness import Run

PACKAGE = str(ROOT / "kempner") + os.sep
sys.path.append(str(ROOT / "tests"))

Call = tuple[float, str, str]
"""When a function was called (seconds since the epoch), its file and its place in it."""

Way = dict[str, Counter[str]]
"""How often each function was called, by file."""


def trace(out: Path, arguments: list[str]) -> None:
    """Be `kempner ARGUMENTS`, and write each call of a function of kempner to `out`."""
    calls: list[tuple[float, str, int, str]] = []
    leave = os._exit

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        named = not code.co_name.startswith("<")  # a lambda or comprehension is its function's
        if event == "call" and named and code.co_filename.startswith(PACKAGE):
            calls.append((time.time(), code.co_filename, code.co_firstlineno, code.co_qualname))

    def write() -> None:
        sys.setprofile(None)
        lines = (f"{at}\t{file[len(PACKAGE) :]}\t{name}:{line}\n" for at, file, line, name in calls)
        out.write_text("".join(lines))

    def write_and_leave(code: int) -> None:
        write()
        leave(code)

    os._exit = write_and_leave  # type: ignore[assignment]
    atexit.register(write)
    threading.setprofile(note)
    sys.setprofile(note)
    sys.argv = ["kempner", *arguments]
    from kempner.cli.entry import main as enter

    enter()


def read_calls(file: Path) -> list[Call]:
    lines = (line.split("\t") for line in file.read_text().splitlines())
    return [(float(at), path, name) for at, path, name in lines]


def between(calls: Iterable[Call], begin: float, end: float) -> Way:
    """The functions that were called between two moments, and how often, by file."""
    passed: Way = defaultdict(Counter)
    for at, path, name in calls:
        if begin <= at <= end:
            passed[path][name] += 1
    return passed


def functions_of(way: Way) -> int:
    return sum(map(len, way.values()))


def page(way: Way) -> str:
    """The functions of a way, by file, and how often each was called."""
    lines = []
    for path, functions in sorted(way.items(), key=lambda item: (-len(item[1]), item[0])):
        lines.append(f"{path}: {len(functions)}")
        lines += [f"    {name} {times}" for name, times in functions.items()]
    return "\n".join([*lines, ""])


def traced(out: Path, *command: str) -> list[str]:
    return [sys.executable, __file__, "--trace", str(out), *command]


def step(run: Run, folder: Path) -> Way:
    """Of rank 0: the median of steps that neither save nor evaluate."""
    place = {
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "TORCHELASTIC_RUN_ID": "ways",
    }
    place["MASTER_PORT"] = str(free_port("127.0.0.1", "ways"))
    files = [folder / f"rank-{rank}" for rank in range(2)]
    ranks = [
        run.start(
            traced(file, "train"),
            "--checkpoint.interval=1000",
            spare=False,
            **place,
            RANK=str(rank),
            LOCAL_RANK=str(rank),
        )
        for rank, file in enumerate(files)
    ]
    for rank in ranks:
        assert rank.wait() == 0, rank.output()
    times = [line["time"] for line in run.metrics()][10:30]
    calls = read_calls(files[0])
    ways = [between(calls, begin, end) for begin, end in pairwise(times)]
    return sorted(ways, key=functions_of)[len(ways) // 2]


def stop_and_death(run: Run, folder: Path) -> dict[str, Way]:
    """Of one supervisor: a rank is killed, and after the restart a SIGTERM comes."""
    out = folder / "supervisor"
    job = run.start(traced(out, "supervise", "--nproc", "2"), "--train.max_steps=1000000")
    run.reach(12, job)
    killed = run.ready_pid(1, 1, job)
    died = time.time()
    os.kill(killed, signal.SIGKILL)
    run.ready_pid(2, 0, job)
    run.reach(max(run.steps()) + 10, job)
    asked = time.time()
    job.signal()
    assert job.wait() == 75, job.output()
    left = time.time()
    (started,) = [e["time"] for e in run.events("attempt_started") if e["attempt"] == 2]
    calls = read_calls(out)
    return {
        "a SIGTERM to the supervisor's exit": between(calls, asked, left),
        "a rank's death to the next start": between(calls, died, started),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    records.add_option(parser)
    parser.add_argument("--list", type=Path, metavar="FOLDER", help="for a page per way")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tokens(folder / "tokens", [[n * n % 257 for n in range(20_000)]])
        alone, supervised = (Run(folder / kind, folder / "tokens") for kind in ("alone", "daemon"))
        ways = {"one step of one rank": step(alone, folder)}
        ways |= stop_and_death(supervised, folder)
    if arguments.list is not None:
        arguments.list.mkdir(parents=True, exist_ok=True)
        for name, way in ways.items():
            (arguments.list / f"{name}.txt").write_text(page(way))
    rows = [
        {"way": name, "functions": functions_of(way), "files": len(way)}
        for name, way in ways.items()
    ]
    records.result(arguments.record, "ways", ("kempner",), rows)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--trace"]:
        trace(Path(sys.argv[2]), sys.argv[3:])
    else:
        import records
        from harness import Run, write_tokens

        from kempner.cluster.network.ports import free_port

        main()
