"""What a rank tells its supervisor by itself: its progress, and now and then what it uses."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from kempner.run.control.heartbeat import Progress
from kempner.run.control.protocol import Report, Usage
from kempner.run.process.whereabouts import CodePlace

USAGE_BEAT = 10.0
"""Seconds between two measurements of what the process uses of its node."""


class RankReports:
    """Knows when the next report is due; each can be lost, for the next one says it again."""

    def __init__(self, progress: Progress, measure: Callable[[], Usage | None]) -> None:
        self._progress, self._measure = progress, measure
        self.next_at = self._usage_at = 0.0
        """When the next is due, in seconds of `time.monotonic`."""

    def place(self) -> CodePlace:
        """Where the program stands, if it is the user's own."""
        return self._progress.place()

    def hurry(self, usage: bool = False) -> None:
        """Have a report be due now, with what the process uses if `usage` is asked for."""
        self.next_at = 0.0
        if usage:
            self._usage_at = 0.0

    def due(self, beat: float, skip: bool = False) -> Iterator[Report | Usage]:
        """What is due, if anything; the next is `beat` seconds later. With `skip` only that."""
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + beat
        if skip:
            return
        yield self._progress.report()
        if now >= self._usage_at:
            self._usage_at = now + USAGE_BEAT
            if (usage := self._measure()) is not None:
                yield usage
