"""The simulator against real runs: what 33 injected failures cost, by category.

    python benchmarks/goodput/prediction_drill.py [--folder FOLDER] [--rounds 3] [--faults 11]
                                                  [--seed 0] [--record FILE.jsonl]

`inject.py` strikes pairs of runs side by side, one to fit the times on, one to predict, with other
faults. The simulator is given the schedule of the second of each pair, which is an input to the
real run as well, and nothing else of it. Both are counted from the first step of a run to the first
one after its last failure. Runs that are in the folder already are only compared.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records
from failures import Failure, Kind
from inject import INTERVAL, Strike, strikes_of
from phase_times import PhaseTimes, collect
from simulator import Cluster, Measures, Outcome, Run

from kempner.insight.report.summary import read_run
from kempner.insight.report.timeline import Category
from kempner.run.record.run_dir import RunDirectory

PROVES = ["benchmarks/goodput", "kempner/insight/report", "kempner/supervisor"]
COMPARED = ("detect", "start", "load", "recompute", "stall")


class Replay(Run):
    """A run that is struck `after` seconds after the first step of each attempt."""

    def __init__(self, times: PhaseTimes, strikes: list[Strike], seed: int) -> None:
        measures = Measures(INTERVAL * times.mean("step"))
        super().__init__(Cluster(2), times, measures, iter(()), 1e9, seed)
        self.strikes = list(strikes)
        self.strike()

    def strike(self) -> None:
        """Set the next failure, or end."""
        if not self.strikes:
            self.end = self.now
            return
        strike = self.strikes.pop(0)
        self.next = Failure(self.now + strike.after, Kind.HANG if strike.hang else Kind.PROCESS)

    def suffer(self, failure: Failure) -> Failure | None:
        """As ever; the next attempt begins here."""
        super().suffer(failure)
        self.strike()
        return None


@dataclass(frozen=True)
class Cost:
    """Seconds by category."""

    seconds: dict[str, float]

    @classmethod
    def predicted(cls, outcome: Outcome) -> Cost:
        """By the simulator."""
        return cls({name: outcome.seconds[name] for name in COMPARED})

    @classmethod
    def real(cls, run: Path) -> Cost:
        """As the run's report counts it, without its first start and its last stop."""
        found = dict.fromkeys(COMPARED, 0.0)
        attempts = read_run(RunDirectory(run)).timeline.attempts
        for place, time in enumerate(attempts):
            body, ending = time.body.seconds(), time.tail.seconds()
            last = place == len(attempts) - 1
            if place > 0:
                found["start"] += float(body[Category.START])
                found["load"] += float(body[Category.LOAD])
            found["stall"] += 0.0 if last else float(body[Category.SAVE])
            found["recompute"] += float(body[Category.RECOMPUTED])
            if not last:
                found["recompute"] += float(ending[Category.RECOMPUTED])
                found["detect"] += float(ending[Category.HUNG] + ending[Category.STOP])
                found["start"] += float(time.gap.seconds()[Category.START])
        return cls(found)


def total(costs: list[Cost]) -> dict[str, float]:
    """Of several runs."""
    return {name: sum(cost.seconds[name] for cost in costs) for name in COMPARED}


def compare(folder: Path, rounds: int, seeds: int) -> list[dict[str, object]]:
    """The rows of the table: seconds of the real runs and of the predictions, by category."""
    runs = folder / "runs"
    times = collect([runs / f"fit-{n}" for n in range(rounds)], "fitted")
    strikes = [strikes_of(folder, f"drill-{n}") for n in range(rounds)]
    real = total([Cost.real(runs / f"drill-{n}") for n in range(rounds)])
    draws = random.Random(0)
    guesses = [
        total([
            Cost.predicted(Replay(times, each, draws.randrange(1 << 30)).until_the_end())
            for each in strikes
        ])
        for _ in range(seeds)
    ]  # fmt: skip
    struck = [strike for each in strikes for strike in each]
    print(f"{len(struck)} failures, of these {sum(strike.hang for strike in struck)} hangs")
    return [row(name, real, guesses) for name in (*COMPARED, "all")]


def row(name: str, real: dict[str, float], guesses: list[dict[str, float]]) -> dict[str, object]:
    """A category, or all of them."""
    drawn = [sum(g.values()) if name == "all" else g[name] for g in guesses]
    was = sum(real.values()) if name == "all" else real[name]
    middle, (low, *_, high) = statistics.fmean(drawn), statistics.quantiles(drawn, n=20)
    return {
        "category": name,
        "real": round(was, 1),
        "predicted": round(middle, 1),
        "5 % to 95 % of draws": [round(low, 1), round(high, 1)],
        "predicted by real": round(middle / was, 2),
    }


def main() -> None:
    """Strike the runs if there are none yet, and compare."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path, help="of the runs; a temporary one without it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--faults", type=int, default=11)
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--draws", type=int, default=200, help="of the simulator")
    records.add_option(parser)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        if not (folder / "runs").exists():
            inject = [sys.executable, str(Path(__file__).with_name("inject.py")), str(folder)]
            numbers = options.rounds, options.faults, options.seed
            subprocess.run([*inject, *map(str, numbers)], check=True)
        rows = compare(folder, options.rounds, options.draws)
    records.result(options.record, "goodput drill", PROVES, rows)


if __name__ == "__main__":
    main()
