"""The file in which a rank that does not import kempner reports its progress.

`120` is the last completed step, `120 complete` says that the run is complete after it, `complete`
alone that the run is complete. The rank finds the path in its environment, so that any language can
write the file. A reader ignores a line that is only partly written, and looks again later.

Only the standard library is imported here: `kempner heartbeat` must be quick.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

HEARTBEAT_FILE = "KEMPNER_HEARTBEAT_FILE"
"""The variable with the path of a rank's own file."""


COMPLETE = "complete"


LONGEST = 64
"""Bytes of a file that are read."""


@dataclass(frozen=True)
class Heartbeat:
    """The last completed `step` (None: not given), and whether the run is `complete` after it."""

    step: int | None = None
    complete: bool = False

    def text(self) -> str:
        """The content of the file."""
        words = ([] if self.step is None else [str(self.step)]) + [COMPLETE] * self.complete
        return " ".join(words) + "\n"


def parse(text: str) -> Heartbeat | None:
    """The heartbeat in a file's text; None if there is none."""
    words = text.split()
    complete = words[-1:] == [COMPLETE]
    numbers = words[:-1] if complete else words
    if len(numbers) > 1 or not words:
        return None
    if not numbers:
        return Heartbeat(complete=True)
    number = numbers[0]
    readable = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
    return Heartbeat(int(number), complete) if readable else None


_DIGITS = 15


def path_in(environ: Mapping[str, str]) -> Path | None:
    """The heartbeat file of the rank with this environment; None without a supervisor."""
    path = environ.get(HEARTBEAT_FILE)
    return Path(path) if path else None


def write(path: Path, beat: Heartbeat) -> None:
    """Replace the file atomically. Raises `OSError`."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(beat.text())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
