"""Nanoseconds per index of the sample order.

python benchmarks/order.py [--samples 1000000000]
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import process_time
from timeit import repeat

import numpy as np

from kempner.data.order.shuffle import SampleOrder

sys.path.append(str(Path(__file__).resolve().parents[1] / "tests"))
import records

_REPEATS = 15


def per_call(call: Callable[[], object], number: int) -> float:
    """Median over several runs, in nanoseconds of processor time: cores may be shared."""
    return median(repeat(call, timer=process_time, number=number, repeat=_REPEATS)) / number * 1e9


def main() -> None:
    """Measure single indices and batches, in the third epoch."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--samples", type=int, default=10**9)
    records.add_option(parser)
    arguments = parser.parse_args()
    n = arguments.samples
    order, start = SampleOrder(n, seed=1), 2 * n + 12_345
    rows = [
        {"samples": n, "at once": 1, "ns an index": per_call(lambda: order.locate(start), 5_000)}
    ]
    for size in (64, 4096):
        positions = np.arange(start, start + size)
        nanoseconds = per_call(lambda at=positions: order.samples(at), 200) / size  # type: ignore[misc]
        rows.append({"samples": n, "at once": size, "ns an index": nanoseconds})
    records.result(arguments.record, "order", ("kempner/data/order",), rows)


if __name__ == "__main__":
    main()
