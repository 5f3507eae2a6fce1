"""Durations of the last saves, to estimate the next one."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

REMEMBERED = 20
"""Saves that count: enough for a 95th percentile, few enough to follow changes of storage."""


def nearest_rank(values: Iterable[float], fraction: float) -> float | None:
    """The smallest of `values` that at least `fraction` (0 to 1) of them do not exceed; None
    without values."""
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


def young_interval(cost: float, between_failures: float) -> float:
    """The optimal seconds between saves: sqrt(2 x cost of a save x time between failures). Young,
    "A first order approximation to the optimum checkpoint interval", 1974."""
    return math.sqrt(2 * cost * between_failures)


@dataclass(frozen=True)
class SaveSeconds:
    """Seconds of a save's parts: copying the state, writing by all ranks, committing."""

    stage: float
    write: float
    commit: float

    @property
    def total(self) -> float:
        """From the call of `save` to a durable `latest`."""
        return self.stage + self.write + self.commit


@dataclass(frozen=True)
class Durations:
    """The last saves, oldest first."""

    saves: tuple[SaveSeconds, ...] = ()

    def with_another(self, save: SaveSeconds) -> Self:
        return type(self)((*self.saves, save)[-REMEMBERED:])

    def quantile(self, fraction: float) -> float | None:
        """The seconds that `fraction` (0 to 1) of the saves do not exceed; None without saves."""
        return nearest_rank((save.total for save in self.saves), fraction)
