"""The ledger: append-only events of a run, one JSON object per line.

Written by the supervisor, which gets rank 0's events over the control channel; by rank 0 itself
where there is no supervisor, or none any more. A line torn by a kill is skipped by readers and
never merges with the next one. docs/events.md lists the events.

Appends JSON lines (metrics, sample ids, events) to a file that this process alone appends to.

A write that fails never fails the run, and one that hangs does not hold it up: the lines are kept
and written later. That lines cannot be written is said once, and how many came late or were lost
when they can again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from kempner.run.output.background_files import open_lines
from kempner.run.output.logs import warn
from kempner.run.record.events import LedgerEvent


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


SCHEMA = 1


class EventRecorder(Protocol):
    """Takes an event for the run's ledger; only rank 0's calls need go anywhere."""

    def __call__(self, event: LedgerEvent) -> None: ...


class Ledger(JsonlWriter):
    """The ledger of a run, open for writing."""

    def record(self, event: LedgerEvent, attempt: int) -> None:
        """Append an event of the attempt with this number."""
        head = {"schema": SCHEMA, "time": round(time.time(), 3), "event": event.name}
        self.append({**head, "attempt": attempt, **event.to_fields()})


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The complete JSON objects of a .jsonl file, in order; nothing if the file is absent."""
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return
    yield from parse_lines(content)


def parse_lines(content: bytes) -> Iterator[dict[str, Any]]:
    """The complete JSON objects among these lines, in order."""
    for line in content.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue  # torn by a kill: its writer never said that it was written
        if isinstance(entry, dict):
            yield entry
