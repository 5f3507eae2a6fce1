"""DataLoaders go on after a stop with the next sample, and read nothing else."""

from __future__ import annotations

import multiprocessing
import re
import signal
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice

import pytest
import torch
from data_sets import WORKERS, Numbers, expected
from harness import ROOT
from torch import Tensor
from torchdata.stateful_dataloader import StatefulDataLoader

import kempner
from kempner.checkpoint.format.manifest import TrainState
from kempner.data.serve.sampler import (
    ResumableBatchSampler,
    ResumableDataLoader,
    ResumableSampler,
)


@pytest.mark.parametrize("options", WORKERS)
def test_a_resumed_loader_reads_only_what_is_trained_on(options: dict[str, int]) -> None:
    n, trained = 41, []
    loader = ResumableDataLoader(Numbers(n), ResumableBatchSampler(range(n), 4, seed=5), **options)
    for epoch in range(2):
        loader.set_epoch(epoch)
        for number, batch in enumerate(loader):
            trained += batch.tolist()
            if epoch == 1 and number == 3:
                break
    state = loader.state_dict()
    assert state["position"] == len(trained) == n + 16

    numbers = Numbers(n)
    again = ResumableDataLoader(numbers, ResumableBatchSampler(range(n), 4, seed=5), **options)
    again.load_state_dict(state)
    again.set_epoch(1)
    assert len(again) == 11
    rest = [index for batch in again for index in batch.tolist()]
    assert trained + rest == expected(n, 0, 2 * n, seed=5)
    assert numbers.counts() == Counter(rest)
    again.set_epoch(2)
    whole = [index for batch in again for index in batch.tolist()]
    assert whole == expected(n, 2 * n, 3 * n, seed=5)


@pytest.mark.parametrize("options", WORKERS)
@pytest.mark.parametrize("told", [True, False])
@pytest.mark.parametrize("single", [True, False])
def test_the_loader_of_torchdata_saves_the_place_in_the_samplers(
    options: dict[str, int], *, told: bool, single: bool
) -> None:
    n = 23

    def load(numbers: Numbers) -> tuple[StatefulDataLoader[int], ResumableSampler]:
        if single:
            sampler = ResumableSampler(numbers)
            return StatefulDataLoader(numbers, 3, sampler=sampler, **options), sampler
        batch_sampler = ResumableBatchSampler(numbers, 3)
        return StatefulDataLoader(numbers, batch_sampler=batch_sampler, **options), batch_sampler

    loader, sampler = load(Numbers(n))
    trained = []
    for batch in islice(loader, 4):
        trained += batch.tolist()
        if told:
            sampler.advance(3 if single else 1)
    state = loader.state_dict()
    numbers = Numbers(n)
    again, _ = load(numbers)
    again.load_state_dict(state)
    rest = [index for batch in again for index in batch.tolist()]
    assert trained + rest == expected(n, 0, n)
    assert numbers.counts() == Counter(rest)


def test_the_loops_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped after each number of batches, both train on every sample once an epoch."""
    page = (ROOT / "docs" / "data.md").read_text()
    over_steps, over_epochs = re.findall(r"```python\n(.*?)```", page, re.S)
    trained: list[int] = []
    states: list[dict[str, int]] = []

    class Steps:
        def __init__(self, done: int, stop: int) -> None:
            self.train_state = TrainState(step=done)
            self._steps = range(done + 1, stop + 1)

        def __iter__(self) -> Iterator[int]:
            return iter(self._steps)

    def train(batch: Tensor) -> None:
        trained.extend(batch.tolist())

    names = {"model": None, "optimizer": None, "dataset": Numbers(27), "train": train}
    for done, stop in ((0, 1), (1, 3), (3, 5)):
        monkeypatch.setattr(
            kempner, "survive", lambda *_, done=done, stop=stop, **__: Steps(done, stop)
        )
        exec(over_steps, names)
    assert trained == expected(27, 0, 5 * 16)

    class Stopped(Exception):
        pass

    def save(state: dict[str, int]) -> None:
        states.append(state)
        if len(states) % 3 == 0:
            raise Stopped

    trained.clear()
    names |= {"save": save}
    for _ in range(4):
        with suppress(Stopped):
            exec(over_epochs, names | {"saved": states[-1] if states else None})
    assert trained == expected(27, 0, 3 * 27, seed=1)


def test_a_stop_signal_to_a_worker_does_not_end_it() -> None:
    numbers, begun = Numbers(400), []

    class Begun(Numbers):
        def __getitem__(self, index: int) -> int:
            assert begun == [True]
            return super().__getitem__(index)

    sampler = ResumableBatchSampler(numbers, 2)
    then = begun.append
    loader = ResumableDataLoader(
        Begun(400), sampler, num_workers=2, worker_init_fn=lambda _: then(True)
    )
    batches = iter(loader)
    trained = next(batches).tolist()
    for worker in multiprocessing.active_children():
        for number in (signal.SIGTERM, signal.SIGINT):
            subprocess.run(["kill", f"-{number}", str(worker.pid)], check=True)
    trained += [index for batch in batches for index in batch.tolist()]
    assert trained == expected(400, 0, 400)


def test_the_loader_draws_no_number_of_the_global_generator() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    loader = ResumableDataLoader(range(8), ResumableBatchSampler(range(8), 4))
    assert len(list(loader)) == 2
    assert torch.equal(torch.get_rng_state(), before)
