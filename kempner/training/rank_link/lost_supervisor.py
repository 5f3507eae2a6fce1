"""Tells whether a run's supervisor has died: by its lease, which it renews as long as it lives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from kempner.run.process.awake_clock import AwakeClock
from kempner.run.record.lease import (
    RELEASED,
    RENEWALS,
    Holder,
    Seen,
    holder_lives,
    look,
)

STILL = 2.5
"""Renewals that must not have come for a lease to have no living holder. Not the whole lease: this
is asked only where nobody listens any more, either."""

LOOK_EVERY = 0.5
"""Seconds between two looks at a file that hundreds of ranks may look at."""


@dataclass(frozen=True)
class Watched:
    """What was seen of a lease, unchanged since `since`, in seconds of some clock."""

    seen: Seen
    since: float


def has_died(watched: Watched, now: float, machine: str, lives: bool) -> bool:
    """Whether the holder of a lease is dead, rather than that it has left in order.

    `machine` is this one, and `lives` whether the process is there that the lease names.
    """
    seen = watched.seen
    if seen.beat == RELEASED or seen.holder is None:
        return False
    if seen.holder.machine == machine:
        return not lives
    return now - watched.since > STILL * seen.holder.lasts / RENEWALS


class SupervisorWatch:
    """Looks at the lease of the supervisor that has started this rank."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._clock = folder, AwakeClock()
        self._here = Holder.here(0.0).machine
        self._watched: Watched | None = None
        self._looked_at = -LOOK_EVERY
        self._died = False

    def died(self) -> bool:
        """Whether it is dead: known at once on its machine, elsewhere after a few renewals."""
        now = self._clock.now()
        if not self._died and now - self._looked_at >= LOOK_EVERY:
            self._looked_at = now
            self._died = self._look(now)
        return self._died

    def _look(self, now: float) -> bool:
        try:
            seen = look(self._folder)
        except (OSError, ValueError):
            return False  # storage that fails says nothing
        if seen is None:
            return False
        if self._watched is None or self._watched.seen != seen:
            self._watched = Watched(seen, now)
        return has_died(self._watched, now, self._here, holder_lives(seen.holder))
