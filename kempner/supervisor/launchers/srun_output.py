"""Reads what srun says of its tasks, and passes all of it on to the job's log."""

from __future__ import annotations

import re
import signal
import sys
from collections.abc import Callable, Iterator

_ENDED = re.compile(r"srun: error: \S+: tasks? ([\d,-]+): (.+?)(?: \(core dumped\))?\s*$")
_CODE = re.compile(r"Exited with exit code (\d+)$")
_SIGNALS = {signal.strsignal(number): -number for number in signal.Signals}
_LONGEST = 4096
"""Bytes of a line that are looked at: no line of srun's is longer."""


def task_ends(line: str) -> Iterator[tuple[int, int]]:
    """The tasks that have ended by what srun says, each with its exit status, or minus the signal.

    `srun: error: node2: task 1: Killed`; also of several: `tasks 1,3-4: Exited with exit code 1`.
    """
    found = _ENDED.match(line)
    status = None if found is None else _status(found[2])
    if found is None or status is None:
        return
    for part in found[1].split(","):
        first, _, last = part.partition("-")
        for task in range(int(first), int(last or first) + 1):
            yield task, status


def _status(words: str) -> int | None:
    if code := _CODE.match(words):
        return int(code[1])
    return -signal.SIGKILL if words == "Out Of Memory" else _SIGNALS.get(words)


class StepErrors:
    """What a step prints on its standard error; `ended` is told of each task that has ended."""

    def __init__(self, ended: Callable[[int, int], None]) -> None:
        self._ended, self._rest = ended, b""

    def hear(self, chunk: bytes) -> None:
        """Pass on what came, and look in it for the ends of tasks."""
        _write(chunk)
        *lines, rest = (self._rest + chunk).split(b"\n")
        for line in lines:
            for task, status in task_ends(line.decode(errors="replace")):
                self._ended(task, status)
        self._rest = rest[-_LONGEST:]


def _write(chunk: bytes) -> None:
    if sys.stderr is not None:
        sys.stderr.buffer.write(chunk)
        sys.stderr.flush()
