"""What each measure against failures gives, by the size of the job: a prediction with ranges.

    python benchmarks/goodput/table.py [--gpus 1024 4096 16384] [--days 54] [--seeds 20]
                                       [--times mine.json]

Each row adds to the one above. Goodput and each category are per cent of the wall time: medians
over the seeds, and of goodput the lowest and the highest. What it rests on: docs/goodput.md.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import replace
from pathlib import Path

from failures import FailureRates
from phase_times import CLUSTER, PhaseTimes, load
from simulator import Cluster, Measures, Outcome, simulate, young_interval

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


def row(gpus: int, name: str, stands: str, found: list[Outcome]) -> str:
    """A row of the table."""
    goodput = [100 * each.share("train") for each in found]
    cells = [f"{gpus:,}", name, stands, f"**{statistics.median(goodput):.2f}**"]
    cells.append(f"{min(goodput):.2f} to {max(goodput):.2f}")
    for category in SHOWN:
        cells.append(f"{100 * statistics.median(each.share(category) for each in found):.2f}")
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 4096, 16_384])
    parser.add_argument("--days", type=float, default=54.0)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--times", type=Path, default=CLUSTER)
    options = parser.parse_args()
    times, rates = load(options.times), FailureRates()
    print(f"| GPUs | measures | | goodput | range | {' | '.join(SHOWN)} |")
    print("|---" * (5 + len(SHOWN)) + "|")
    for gpus in options.gpus:
        for name, stands, measures in ladder(times, rates, gpus):
            found = [
                simulate(Cluster(gpus), rates, times, measures, options.days, seed)
                for seed in range(options.seeds)
            ]
            print(row(gpus, name, stands, found), flush=True)


if __name__ == "__main__":
    main()
