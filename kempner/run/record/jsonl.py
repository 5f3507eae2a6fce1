"""Appends JSON lines (metrics, sample ids, events) to a file that this process alone appends to.

A write that fails never fails the run, and one that hangs does not hold it up: the lines are kept
and written later. That lines cannot be written is said once, and how many came late or were lost
when they can again.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from kempner.run.output.background_files import open_lines
from kempner.run.output.logs import warn


class JsonlWriter:
    """A file of JSON lines."""

    def __init__(self, path: Path) -> None:
        self._file = open_lines(path, warn)

    def append(self, entry: Mapping[str, object]) -> None:
        """Append an object of JSON values."""
        self._file.append(json.dumps(entry))

    def unwritten(self) -> list[str]:
        """The lines that could not be written yet, oldest first."""
        return self._file.unwritten()
