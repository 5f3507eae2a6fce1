"""The file in which a rank that knows nothing of kempner says how far it is.

`120` is a step, `120 complete` says that the run is complete with it, `complete` alone as well. Its
path is in the environment of the rank, so that any language can write it. A reader sees a whole
line, or a part of one that is being written, which it ignores until the next look.

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
"""The word that says that the run is complete."""


LONGEST = 64
"""Bytes of a file that are looked at."""


@dataclass(frozen=True)
class Heartbeat:
    """What a rank has said: the last `step` that is done (None: not said), and whether the run is
    `complete` with it."""

    step: int | None = None
    complete: bool = False

    def text(self) -> str:
        """As the file has it."""
        words = ([] if self.step is None else [str(self.step)]) + [COMPLETE] * self.complete
        return " ".join(words) + "\n"


def parse(text: str) -> Heartbeat | None:
    """What a file says; None if that makes no sense."""
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
    """The file of the rank that has this environment; None outside of a supervised program."""
    path = environ.get(HEARTBEAT_FILE)
    return Path(path) if path else None


def write(path: Path, beat: Heartbeat) -> None:
    """Replace what was said before. Raises `OSError`."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(beat.text())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)
