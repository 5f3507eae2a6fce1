"""Writes each rank's last known step and phase to disk, for `kempner status`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from kempner.run.control.heartbeat import describe_places
from kempner.run.output.background_files import LatestContent
from kempner.run.output.logs import warn
from kempner.supervisor.control.events import LastReport

EVERY = 2.0
"""Seconds between two versions of the file."""


class RankStatusFile:
    """Keeps the file up to date. It is worth having, but never worth the run."""

    def __init__(self, path: Path) -> None:
        self._file = LatestContent(path, warn)
        self._written: Mapping[int, LastReport] = {}
        self._due_at = 0.0

    def update(self, seen: Mapping[int, LastReport], *, now: bool = False) -> None:
        """Write what has changed, if it is time, or `now`."""
        if seen == self._written or (time.monotonic() < self._due_at and not now):
            return
        self._due_at = time.monotonic() + EVERY
        self._file.replace(describe_places({rank: last.report for rank, last in seen.items()}))
        self._written = seen
