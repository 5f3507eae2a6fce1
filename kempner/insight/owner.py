"""Whether a run has an owner, as far as one reading of its lease tells."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from kempner.run.process.awake_clock import AwakeClock
from kempner.run.record.lease import (
    RELEASED,
    RENEWALS,
    Holder,
    LeaseReading,
    holder_lives,
    is_owned,
    look,
)

MISSED = 3
"""Renewals without which an owner is taken for dead, as by `is_owned`."""

LONG_AGO = 3600.0
"""Seconds since the last renewal after which a run has no owner, however wrong a clock may be."""


def judge_lease(seen: LeaseReading, age: float, unchanged_for: float) -> bool | None:
    """Whether the owner on another machine lives; None if that takes a longer look.

    `age` is how long ago the lease was renewed, in seconds by two clocks; `unchanged_for` for how
    long it has been seen to stand still, by one.
    """
    if seen.beat == RELEASED or seen.holder is None:
        return False
    patience = MISSED * seen.holder.lasts / RENEWALS
    if 0 <= age <= patience:
        return True
    if unchanged_for > patience or age > LONG_AGO:
        return False
    return None


class OwnerWatch:
    """Looks at the lease of a run now and then, and remembers since when it has stood still."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now, self._clock = folder, now, AwakeClock()
        self._seen: LeaseReading | None = None
        self._since = 0.0

    def glance(self) -> bool | None:
        """What is known without waiting. Raises `OSError` if the lease cannot be read now."""
        try:
            seen = look(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if seen is None:
            return False
        holder = seen.holder
        if seen.beat != RELEASED and holder is not None and _is_here(holder):
            return holder_lives(holder)
        moved = self._seen is not None and seen != self._seen
        if self._seen is None or moved:
            self._seen, self._since = seen, self._clock.now()
        if moved and seen.beat != RELEASED:
            return True
        age = self._now() - (self._folder / str(seen.number)).stat().st_mtime
        return judge_lease(seen, age, self._clock.now() - self._since)

    def look(self) -> bool | None:
        """The same, looking twice where that is needed: it takes seconds."""
        found = self.glance()
        return is_owned(self._folder) if found is None else found


def _is_here(holder: Holder) -> bool:
    return holder.machine == Holder.here(holder.lasts).machine
