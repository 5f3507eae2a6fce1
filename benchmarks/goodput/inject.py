"""Runs of two ranks that are struck many times, for `prediction_drill.py`: by SIGKILL, or a hang.

A seed says how many seconds after the first step of an attempt a fault comes. What it cost is not
looked at here: that is read from the run's own ledger and metrics afterwards.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "starts"))

from restart import CONFIG, lines, write_tokens  # noqa: E402

HANGS = """
[resilience]
hang_timeout_min = 20.0
hang_timeout_max = 20.0
[resilience.hang_timeout_max_of]
start = 300.0
"""
INTERVAL = 20
"""Steps between two saves."""

RANKS = 2
WITHIN = 240.0
"""Seconds that anything may take."""


@dataclass(frozen=True)
class Strike:
    """A fault, `after` seconds of an attempt's steps."""

    after: float
    hang: bool


def schedule(seed: int, faults: int, mean: float) -> list[Strike]:
    """Exponential gaps of `mean` seconds and two at least; one fault in eight is a hang."""
    rng = random.Random(seed)
    hung = set(rng.sample(range(faults), faults // 8))
    return [Strike(2.0 + rng.expovariate(1 / mean), number in hung) for number in range(faults)]


def struck_run(folder: Path, name: str, strikes: list[Strike]) -> Path:
    """Train, strike, and stop in order after the last fault; the run's directory."""
    config, run = folder / f"{name}.toml", folder / "runs" / name
    config.write_text(CONFIG.format(folder=folder, name=name, interval=INTERVAL) + HANGS)
    (folder / f"{name}.json").write_text(json.dumps([asdict(strike) for strike in strikes]))
    command = [sys.executable, "-m", "kempner", "supervise", str(config), f"--nproc={RANKS}"]
    with open(folder / f"{name}.log", "wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        attempt = 0
        for strike in strikes:
            attempt = _wait_for(lambda a=attempt: _newer(run, a), process)
            time.sleep(strike.after)
            victim = _wait_for(lambda a=attempt: _rank_pid(run, a, RANKS - 1), process)
            os.kill(victim, signal.SIGSTOP if strike.hang else signal.SIGKILL)
        _wait_for(lambda a=attempt: _newer(run, a), process)
        process.send_signal(signal.SIGTERM)
        process.wait(WITHIN)
    finally:
        if process.poll() is None:
            process.kill()
    return run


def strikes_of(folder: Path, name: str) -> list[Strike]:
    """Those that a run was given."""
    return [Strike(**each) for each in json.loads((folder / f"{name}.json").read_text())]


def _newer(run: Path, attempt: int) -> int | None:
    """The newest attempt with a step, if it is newer than this one."""
    newest = max((line["attempt"] for line in lines(run / "metrics.jsonl")[-1:]), default=0)
    return newest if newest > attempt else None


def _rank_pid(run: Path, attempt: int, rank: int) -> int | None:
    log = lines(run / "attempts" / str(attempt) / f"rank-{rank:05}.jsonl")
    return next((line["pid"] for line in log if line["event"] == "ready"), None)


def _wait_for(look: Callable[[], T | None], process: subprocess.Popen[bytes]) -> T:
    """What `look` finds, as soon as it finds anything."""
    end = time.monotonic() + WITHIN
    while not (found := look()):
        if time.monotonic() > end or process.poll() is not None:
            raise TimeoutError(f"nothing happened; supervisor: {process.poll()}")
        time.sleep(0.05)
    return found


def main() -> None:
    """Strike pairs of runs, `fit-N` beside `drill-N`: `inject.py FOLDER ROUNDS FAULTS SEED`."""
    folder, (rounds, faults, first) = Path(sys.argv[1]), map(int, sys.argv[2:5])
    folder.mkdir(parents=True, exist_ok=True)
    write_tokens(folder)
    for number in range(rounds):
        with ThreadPoolExecutor(2) as pool:
            pair = [
                pool.submit(struck_run, folder, f"{kind}-{number}", schedule(seed, faults, 3.0))
                for kind, seed in (("fit", first + 100 + number), ("drill", first + number))
            ]
        print(*(run.result().name for run in pair), flush=True)


if __name__ == "__main__":
    main()
