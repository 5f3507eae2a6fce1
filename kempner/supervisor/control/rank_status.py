"""Writes each rank's last known step and phase to disk, for `kempner status`."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path

from kempner.run.process.logs import logger
from kempner.supervisor.control.events import LastReport

EVERY = 2.0
"""Seconds between two versions of the file."""


class RankStatusFile:
    """Keeps the file up to date. It is worth having, but never worth the run."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: Mapping[int, LastReport] = {}
        self._due_at = 0.0
        self._failed = False

    def update(self, seen: Mapping[int, LastReport], *, now: bool = False) -> None:
        """Write what has changed, if it is time, or `now`."""
        if seen == self._written or (time.monotonic() < self._due_at and not now):
            return
        self._due_at = time.monotonic() + EVERY
        try:
            self._write(seen)
        except OSError as error:
            if not self._failed:
                logger().warning("cannot be written", file=str(self._path), error=error.strerror)
            self._failed = True
            return
        self._written, self._failed = seen, False

    def _write(self, seen: Mapping[int, LastReport]) -> None:
        ranks = [
            {
                "rank": rank,
                "step": last_report.report.step,
                "phase": last_report.report.phase,
                "worked": last_report.report.worked,
                "waited": last_report.report.waited,
                "waiting": last_report.report.waiting,
            }
            for rank, last_report in sorted(seen.items())
        ]
        new = self._path.with_name(f".{self._path.name}.new")
        new.write_text(json.dumps(ranks))
        new.replace(self._path)
