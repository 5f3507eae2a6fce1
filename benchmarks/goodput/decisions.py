"""Which part of the machine time trains, by the size of the job: a prediction.

    python benchmarks/goodput/decisions.py [--gpus 1024] [--days 10] [--stall 0.8] [--write 60]

The simulated world of the tests, in which kempner's own decisions are taken, is given the failure
rate that was published for Llama 3: 419 unexpected interruptions in 54 days on 16,384 H100s, 78% of
them by hardware ("The Llama 3 Herd of Models", arXiv:2407.21783, section 3.3.4, which reports more
than 90% of effective training time). The rate is taken to grow with the number of GPUs, failures to
be independent. Hardware takes its node out for ten minutes; software kills a rank.

`in place`: ranks are started again in the job, without a lost node; two nodes are spare.
`requeue`: every failure sends the job back into the queue, where Slurm keeps it for 121 s (its
default) and finds nodes at once: a lower bound. A start takes 40 s and a load 20 s (NVRx reports
about a minute for a restart within a job). Training stops for `--stall` seconds per save (0.78 s
for 70B on 1,856 H200s, the PyTorch blog, 2025), and it is durable `--write` seconds later.

Young's interval is sqrt(2 x stall x time between failures) (Young, "A first order approximation to
the optimum checkpoint interval", 1974). Intervals of a quarter to four times that are tried, with
the same failures. Goodput is the time of the steps by the time of the run.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))

import records
from simulated.faults import Fault, Kind, Schedule, Setting
from simulated.files import in_memory
from simulated.world import simulate

RATE = 419 / (54 * 24 * 3600 * 16_384)
"""Failures per GPU and second."""

HARDWARE = 0.78
"""The share of failures that take out a node."""

DAY = 86_400.0
PROVES = ("kempner/supervisor/policy", "kempner/checkpoint/store")
FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)


def failures(gpus: int, seconds: float, in_place: bool, seed: int) -> tuple[Fault, ...]:
    """A Poisson process; the same for every interval."""
    rng, at, found = random.Random(seed), 0.0, list[Fault]()
    while (at := at + rng.expovariate(RATE * gpus)) < seconds:
        hardware = rng.random() < HARDWARE or not in_place
        who = rng.randrange(1 << 16)
        found.append(Fault(at, Kind.NODE_LOST if hardware else Kind.KILL, who))
    return tuple(found)


def goodput(setting: Setting, faults: tuple[Fault, ...]) -> float:
    """The time of the steps by the time of the run."""
    outcome = simulate(Schedule(0, setting, faults))
    if outcome.violation is not None:
        raise outcome.violation
    return setting.max_steps * setting.step / outcome.seconds


def measure(gpus: int, days: float, setting: Setting, seed: int) -> dict[str, object]:
    """A row of the table."""
    between = 1 / (RATE * gpus)
    young = math.sqrt(2 * setting.stall * between)
    intervals = sorted({max(1, round(factor * young / setting.step)) for factor in FACTORS})
    row: dict[str, object] = {"GPUs": gpus, "h between failures": between / 3600}
    row["Young's interval, s"] = young
    for in_place in (True, False):
        faults = failures(gpus, 2 * days * DAY, in_place, seed)
        mode = setting if in_place else replace(setting, spare=0)
        found = {n: goodput(replace(mode, interval=n), faults) for n in intervals}
        best = max(found, key=lambda n: found[n])
        nearest = min(intervals, key=lambda n: abs(n * setting.step - young))
        how = "in place" if in_place else "requeued"
        row[f"{how}, best interval, s"] = best * setting.step
        row[f"{how}, goodput, %"] = f"{found[best]:.2%}".rstrip("%")
        row[f"{how}, at Young's, %"] = f"{found[nearest]:.2%}".rstrip("%")
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gpus", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16_384])
    parser.add_argument("--days", type=float, default=10.0)
    parser.add_argument("--step", type=float, default=20.0, help="seconds of a step")
    parser.add_argument("--stall", type=float, default=0.8, help="seconds that a save stops")
    parser.add_argument("--write", type=float, default=60.0, help="seconds until it is durable")
    parser.add_argument("--seed", type=int, default=1)
    records.add_option(parser)
    options = parser.parse_args()
    setting = Setting(
        nodes=4, per_node=1, spare=2, pool=12, max_steps=round(options.days * DAY / options.step),
        eval_interval=1 << 30, step=options.step, looks=options.step, start=40.0, load=20.0,
        stall=options.stall, write=options.write, begin=121.0, budget=10,
    )  # fmt: skip
    with in_memory():
        rows = [measure(n, options.days, setting, options.seed) for n in options.gpus]
    records.result(options.record, "goodput", PROVES, rows)


if __name__ == "__main__":
    main()
