"""Nanoseconds per index of the sample order: `python benchmarks/order.py [SAMPLES]` (1e9)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from statistics import median
from time import process_time
from timeit import repeat

import numpy as np

from kempner.data.order.shuffle import Order

_REPEATS = 15


def per_call(call: Callable[[], object], number: int) -> float:
    """Median over several runs, in nanoseconds of processor time: cores may be shared."""
    return median(repeat(call, timer=process_time, number=number, repeat=_REPEATS)) / number * 1e9


def main() -> None:
    """Measure single indices and batches, in the third epoch."""
    n = int(float(sys.argv[1])) if len(sys.argv) > 1 else 10**9
    order, start = Order(n, seed=1), 2 * n + 12_345
    print(f"{n:,} samples, processor time, median of {_REPEATS} runs")
    print(f"single index       {per_call(lambda: order.locate(start), 5_000):9,.0f} ns/index")
    for size in (64, 4096):
        positions = np.arange(start, start + size)
        nanoseconds = per_call(lambda at=positions: order.samples(at), 200) / size  # type: ignore[misc]
        print(f"batch of {size:5,}     {nanoseconds:9,.1f} ns/index")


if __name__ == "__main__":
    main()
