"""A short write test: how fast one process of a node writes to a folder, bounded in every way."""

from __future__ import annotations

import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

LARGEST = 128 * 2**20
"""Bytes that a node writes at most."""

TOGETHER = 16 * 2**30
"""Bytes that all nodes write at most."""

SHARE = 0.05
"""Of the free space, the most that all of them take."""

LONGEST = 2.0
"""Seconds after which no further piece is written."""

_PIECE, _LEAST = 4 * 2**20, 4096
_SYNC_EVERY = 4
"""Pieces between two fsyncs: how long the last of them takes is bounded, too."""


@dataclass(frozen=True)
class WriteRate:
    """`written` bytes in `seconds`, with fsync; `trouble` says why it could not be written."""

    written: int
    seconds: float
    trouble: str = ""

    @property
    def rate(self) -> float | None:
        """Bytes a second; None where too little was written to tell."""
        return self.written / self.seconds if self.written and self.seconds > 0 else None


def write_test(folder: Path, name: str, writers: int = 1) -> WriteRate:
    """Write to a file in `folder` that has lost its name before it has any content.

    So nothing is left behind, however this process ends. `writers` is how many nodes do so at once.
    """
    written, began = 0, time.monotonic()
    try:
        together = min(TOGETHER, int(SHARE * shutil.disk_usage(folder).free))
        largest = max(_LEAST, min(LARGEST, together // writers))
        # What cannot be compressed is written as it is.
        content = os.urandom(min(_PIECE, largest))
        path = folder / name
        with open(path, "xb", buffering=0) as file:
            path.unlink()
            began = time.monotonic()
            pieces = 0
            while written < largest and time.monotonic() - began < LONGEST:
                written += file.write(content)
                pieces += 1
                if pieces % _SYNC_EVERY == 0:
                    os.fsync(file.fileno())
            os.fsync(file.fileno())
    except OSError as error:
        return WriteRate(written, time.monotonic() - began, error.strerror or str(error))
    return WriteRate(written, time.monotonic() - began)
