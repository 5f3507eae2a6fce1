"""When a large job fails, and how: independent failures, bursts, and nodes that fail again."""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum, auto

DAY = 86_400.0


class Kind(Enum):
    """What a failure takes along, and so what a restart finds."""

    PROCESS = auto()
    """A process or GPU: the host and its memory stay."""

    HOST = auto()
    """A host with its memory; a spare takes its place."""

    HANG = auto()
    """Nothing moves until that is noticed; the host stays."""

    STORAGE = auto()
    """Storage stands still, and training with it; nothing is lost."""


@dataclass(frozen=True)
class Failure:
    """One failure, `at` seconds; a node that is `left_out` after it is replaced by a spare."""

    at: float
    kind: Kind
    left_out: bool = False


@dataclass(frozen=True)
class FailureRates:
    """How a job fails. Those without a source are assumed, and may be set.

    `per_gpu_day`: 419 unexpected interruptions in 54 days on 16,384 GPUs; `host_share`: 88 of them
    take the host along by our classification of the causes in table 5; `hang_share`: 7 of them are
    NCCL's watchdog ("The Llama 3 Herd of Models", arXiv:2407.21783). `burst_share` of failures
    bring others within `burst_seconds` of each other, `burst_mean` of them. Of the failures that
    leave the host alive, `repeat_share` are of a bad node, which fails again after
    `repeat_seconds`, in the mean, until it is left out after `left_out_after` failures.
    Storage stands still `storage_per_day`, whatever the size.
    """

    per_gpu_day: float = 419 / (54 * 16_384)
    host_share: float = 88 / 419
    hang_share: float = 7 / 419
    burst_share: float = 0.03
    burst_mean: float = 2.0
    burst_seconds: float = 300.0
    repeat_share: float = 0.1
    repeat_seconds: float = 1800.0
    left_out_after: int = 2
    storage_per_day: float = 0.1

    def per_second(self, gpus: int) -> float:
        """Independent failures of a job, storage left aside."""
        return self.per_gpu_day * gpus / DAY

    def host_loss_per_second(self, gpus: int) -> float:
        """Of these, those that take a host along."""
        return self.per_second(gpus) * self.host_share


NOTHING_FAILS = FailureRates(per_gpu_day=0.0, storage_per_day=0.0)
INDEPENDENT = FailureRates(
    host_share=0.0, hang_share=0.0, burst_share=0.0, repeat_share=0.0, storage_per_day=0.0
)
"""A plain Poisson process, in which every failure is a process's."""


def failures(rates: FailureRates, gpus: int, rng: random.Random) -> Iterator[Failure]:
    """All failures of a job by their time, without an end; none if nothing fails."""
    numbers = itertools.count()
    pending: list[tuple[float, int, Failure]] = []

    def expect(found: Iterable[Failure]) -> None:
        for failure in found:
            heapq.heappush(pending, (failure.at, next(numbers), failure))

    storage = _storage(rates, rng, 0.0)
    independent = _independent(rates, gpus, rng, 0.0)
    while storage is not None or independent is not None or pending:
        ahead = min(each.at for each in (storage, independent) if each is not None)
        if pending and pending[0][0] <= ahead:
            yield heapq.heappop(pending)[2]
        elif storage is not None and storage.at == ahead:
            yield storage
            storage = _storage(rates, rng, ahead)
        elif independent is not None:
            yield independent
            expect(_consequences(independent, rates, rng))
            independent = _independent(rates, gpus, rng, ahead)


def _storage(rates: FailureRates, rng: random.Random, now: float) -> Failure | None:
    if rates.storage_per_day <= 0:
        return None
    return Failure(now + rng.expovariate(rates.storage_per_day / DAY), Kind.STORAGE)


def _independent(rates: FailureRates, gpus: int, rng: random.Random, now: float) -> Failure | None:
    if rates.per_gpu_day <= 0:
        return None
    return Failure(now + rng.expovariate(rates.per_second(gpus)), _kind(rates, rng))


def _consequences(failure: Failure, rates: FailureRates, rng: random.Random) -> Iterator[Failure]:
    """The rest of a burst, and what else the same node does before it is left out."""
    later = failure.at
    while rng.random() < _more(rates, begun=later > failure.at):
        later += rng.expovariate(1 / rates.burst_seconds)
        yield Failure(later, _kind(rates, rng))
    if failure.kind is Kind.PROCESS and rng.random() < rates.repeat_share:
        again = failure.at
        for more in reversed(range(rates.left_out_after - 1)):
            again += rng.expovariate(1 / rates.repeat_seconds)
            yield Failure(again, Kind.PROCESS, left_out=more == 0)


def _more(rates: FailureRates, begun: bool) -> float:
    """The chance of another failure in a burst, or of a burst: `burst_mean` follow in the mean."""
    return 1 - 1 / rates.burst_mean if begun else rates.burst_share


def _kind(rates: FailureRates, rng: random.Random) -> Kind:
    drawn = rng.random()
    if drawn < rates.host_share:
        return Kind.HOST
    return Kind.HANG if drawn < rates.host_share + rates.hang_share else Kind.PROCESS
