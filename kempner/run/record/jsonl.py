"""Appends JSON lines (metrics, sample ids, events); a failed write never fails the run.

A full disk must not end a training whose state is intact. A line that cannot be written is counted
instead, said once, and the count is said when lines can be written again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kempner.run.process.durable_io import append_line
from kempner.run.process.logs import logger


class JsonlWriter:
    """A file of JSON lines that is appended to by this process alone."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._missed = 0

    def append(self, entry: Mapping[str, object]) -> None:
        """Append an object of JSON values; a failure is reported once per streak."""
        try:
            append_line(self._path, json.dumps(entry))
        except OSError as error:
            self._missed += 1
            if self._missed == 1:
                logger().warning("cannot write to file", file=str(self._path), error=error.strerror)
            return
        if self._missed:
            logger().warning("can write to file again", file=str(self._path), missed=self._missed)
            self._missed = 0
