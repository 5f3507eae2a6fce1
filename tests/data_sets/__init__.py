"""A data set that counts its reads in all processes, and what a sampler is expected to yield."""

from __future__ import annotations

import multiprocessing
from collections import Counter

import pytest
from torch.utils.data import Dataset

from kempner.data.order.shuffle import SampleOrder

WORKERS = [
    pytest.param({"num_workers": 0}, id="no worker"),
    pytest.param({"num_workers": 2, "prefetch_factor": 3}, id="2 workers"),
    pytest.param({"num_workers": 2, "persistent_workers": True}, id="2 persistent workers"),
]


class Numbers(Dataset[int]):
    """0 to n - 1; counts in all processes how often each is read."""

    def __init__(self, n: int) -> None:
        self.reads = multiprocessing.get_context("fork").Array("i", n)

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> int:
        with self.reads.get_lock():
            self.reads[index] += 1
        return index

    def counts(self) -> Counter[int]:
        return Counter({index: count for index, count in enumerate(self.reads) if count})


def expected(n: int, start: int, stop: int, seed: int = 0) -> list[int]:
    order = SampleOrder(n, seed)
    return [order.locate(position)[1] for position in range(start, stop)]
