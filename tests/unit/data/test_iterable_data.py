"""Iterable data goes on after a stop by the state of torchdata's loader, one for each rank."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from itertools import chain, islice

import pytest
from data_sets import WORKERS
from torch.utils.data import IterableDataset, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

from kempner.checkpoint.registered.objects import held, pack, take, unpack


class Lines(IterableDataset[int]):
    """Numbers of which each rank and each of its workers takes a part; it knows how far it is."""

    def __init__(self, n: int, world: int, rank: int) -> None:
        self.n, self.world, self.rank, self.done = n, world, rank, 0
        self.reads = multiprocessing.get_context("fork").Array("i", n)

    def __iter__(self) -> Iterator[int]:
        worker = get_worker_info()
        number, workers = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = range(self.rank + self.world * number, self.n, self.world * workers)
        for index in mine[self.done :]:
            self.done += 1
            with self.reads.get_lock():
                self.reads[index] += 1
            yield index
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.done = state_dict["done"]


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("stop", [0, 1, 4, 6])
def test_iterable_data_goes_on_from_the_state_of_each_rank(
    options: dict[str, int], stop: int
) -> None:
    """What `docs/data.md` says: torchdata's state, one for each rank, through a checkpoint."""
    n, world, seen = 41, 2, []
    for rank in range(world):
        loader = StatefulDataLoader(Lines(n, world, rank), batch_size=3, **options)
        undisturbed = [batch.tolist() for batch in loader]
        batches = iter(loader)
        trained = [batch.tolist() for batch in islice(batches, stop)]
        saved = pack({"data": held("data", loader)}, "per_rank")

        lines = Lines(n, world, rank)
        again = StatefulDataLoader(lines, batch_size=3, **options)
        objects = {"data": held("data", again)}
        take(unpack(saved, objects, "per_rank", "the checkpoint"), objects)
        rest = [batch.tolist() for batch in again]
        assert trained + rest == undisturbed
        read = [index for index, count in enumerate(lines.reads) for _ in range(count)]
        assert read == sorted(chain(*rest))
        seen += chain(*trained, *rest)
    assert sorted(seen) == list(range(n))
