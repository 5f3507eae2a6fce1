"""Where a rank is, for its supervisor to see: written by the loop, read by another thread.

The loop pays for an attribute; nothing is locked and nothing is sent from here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from kempner.run.messages import Phase, Report


class Progress:
    """The last step that is done, the phase under way, and the time spent waiting for others."""

    def __init__(self) -> None:
        self.step = 0
        self.phase = Phase.START
        self.reached: dict[str, float] = {}
        """Seconds from the start of this process's line to each phase that was entered."""
        self._started = time.monotonic()
        self._waited = 0.0
        self._waiting_since: float | None = None

    def enter(self, phase: Phase) -> None:
        """From now on it is that phase, on the way to training."""
        self.phase = phase
        self.reached[phase] = round(time.monotonic() - self._started, 2)

    @contextmanager
    def during(self, phase: Phase) -> Iterator[None]:
        """The block is that phase; afterwards it is what it was, unless the block raises."""
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """In this block the rank waits for others and does nothing itself."""
        self._waiting_since = since = time.monotonic()
        yield
        self._waited += time.monotonic() - since
        self._waiting_since = None

    def report(self) -> Report:
        """All of it, at this moment; may be called from any thread."""
        now, since = time.monotonic(), self._waiting_since
        waited = self._waited + (now - since if since is not None else 0.0)
        worked = max(0.0, now - self._started - waited)
        return Report(self.step, self.phase, round(worked, 3), round(waited, 3))
