"""Durations of the last saves, to estimate the next one."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

COMMITTED = "checkpoint_committed"
"""The ledger's event that carries a save's durations."""

SUSPENDED = "suspended"
"""Its field that says that Slurm suspended the job meanwhile: no save takes a night."""

RESUMED = "resumed"
"""The ledger's event of a start from a commit, with its step."""

REMEMBERED = 20
"""Saves that count: enough for a 95th percentile, few enough to follow a storage that changes."""


def nearest_rank(values: Iterable[float], fraction: float) -> float | None:
    """The smallest of `values` that at least `fraction` (0 to 1) of them do not exceed, or None.

    None without values; by the nearest-rank method, so it is always one of them.
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else None


@dataclass(frozen=True)
class SaveSeconds:
    """One save in seconds: copied, written by all ranks, committed; in this order, no gaps."""

    stage: float
    write: float
    commit: float

    @property
    def total(self) -> float:
        """From the call of `save` to a durable `latest`."""
        return self.stage + self.write + self.commit

    def as_fields(self) -> dict[str, float]:
        """For the ledger, in milliseconds' precision."""
        return {f"{phase}_seconds": round(value, 3) for phase, value in asdict(self).items()}

    @classmethod
    def from_fields(cls, event: Mapping[str, Any]) -> Self:
        """Raises `KeyError` if the event has no durations."""
        return cls(*(float(event[f"{phase}_seconds"]) for phase in cls.__dataclass_fields__))


@dataclass(frozen=True)
class Durations:
    """The last saves, oldest first."""

    saves: tuple[SaveSeconds, ...] = ()

    def with_another(self, save: SaveSeconds) -> Self:
        """These and `save`, without the oldest ones beyond `REMEMBERED`."""
        return type(self)((*self.saves, save)[-REMEMBERED:])

    def quantile(self, fraction: float) -> float | None:
        """The total seconds that `fraction` (0 to 1) of the saves stayed within, or None.

        None if there is no save yet.
        """
        return nearest_rank((save.total for save in self.saves), fraction)

    @classmethod
    def from_ledger(cls, events: Iterable[Mapping[str, Any]]) -> Self:
        """What a run's ledger tells of its saves; events without durations are passed over."""
        durations = cls()
        for event in events:
            measured = "stage_seconds" in event and not event.get(SUSPENDED)
            if event.get("event") == COMMITTED and measured:
                durations = durations.with_another(SaveSeconds.from_fields(event))
        return durations


def last_step(events: Iterable[Mapping[str, Any]]) -> int | None:
    """The step of the newest commit that the ledger tells of; None if there is none.

    Of one whose rank died before it could say so the next resume tells. A resume from an older one
    is no commit.
    """
    newest: int | None = None
    for event in events:
        name = event.get("event")
        if name == COMMITTED or (name == RESUMED and event["step"] > (newest or 0)):
            newest = event["step"]
    return newest
