"""What each measure against failures gives, by the size of the job: a prediction with ranges.

    python benchmarks/goodput/table.py [--gpus 1024 4096 16384] [--days 54] [--seeds 20]
                                       [--times mine.json] [--record FILE.jsonl]

Each row adds to the one above. Goodput and each category are per cent of the wall time: medians
over the seeds, and of goodput the lowest and the highest. What it rests on: docs/goodput.md.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import replace
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records
from failures import FailureRates
from phase_times import CLUSTER, PhaseTimes, load
from simulator import Cluster, Measures, Outcome, simulate, young_interval

PROVES = ["benchmarks/goodput"]
STANDS, ASSUMED = "stands in kempner", "assumed"
BUDDY_STEPS = 4
LONGEST_INTERVAL = 1800.0
"""Seconds between saves to disk, once only what memory does not cover needs them."""

SHOWN = ("stall", "detect", "start", "load", "recompute", "queue", "storage")


def ladder(times: PhaseTimes, rates: FailureRates, gpus: int) -> list[tuple[str, str, Measures]]:
    """Name, whether it stands, and the measures of each row."""
    stall = times.mean("stall")
    often = Measures(min(LONGEST_INTERVAL, young_interval(stall, rates.per_second(gpus))))
    warm = replace(often, start="start_warm")
    seldom = min(LONGEST_INTERVAL, young_interval(stall, rates.host_loss_per_second(gpus)))
    slots = replace(warm, slots=True, interval=seldom)
    buddy = replace(slots, buddy_steps=BUDDY_STEPS, interval=LONGEST_INTERVAL)
    return [
        ("disk, Young's interval", STANDS, often),
        ("and warm starts", STANDS, warm),
        ("and steps in memory", STANDS, slots),
        (f"and a buddy, every {BUDDY_STEPS} steps", STANDS, buddy),
        ("and a load in 5 s", ASSUMED, replace(buddy, load="load_fast")),
    ]


def row(gpus: int, name: str, stands: str, found: list[Outcome]) -> dict[str, object]:
    """A row of the table."""
    goodput = [100 * each.share("train") for each in found]
    lost = {name: [100 * each.share(name) for each in found] for name in SHOWN}
    return {
        "GPUs": gpus,
        "measures": name,
        "status": stands,
        "goodput": round(statistics.median(goodput), 2),
        "range": [round(end, 2) for end in (min(goodput), max(goodput))],
        **{name: round(statistics.median(shares), 2) for name, shares in lost.items()},
    }


def main() -> None:
    """Predict, print and record."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--times", type=Path, default=CLUSTER)
    records.add_option(parser)
    options = parser.parse_args()
    times, rates = load(options.times), FailureRates()

    def outcomes(gpus: int, measures: Measures) -> list[Outcome]:
        cluster = Cluster(gpus)
        return [
            simulate(cluster, rates, times, measures, options.days, seed)
            for seed in range(options.seeds)
        ]

    rows = [
        row(gpus, name, stands, outcomes(gpus, measures))
        for gpus in options.gpus
        for name, stands, measures in ladder(times, rates, gpus)
    ]
    records.result(options.record, "goodput by measure", PROVES, rows)


if __name__ == "__main__":
    main()
