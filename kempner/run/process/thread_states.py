"""What the threads of a process are doing, by proc(5): standard library only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path


def thread_states(pid: int | str, proc: Path = Path("/proc"), name: str = "") -> list[str]:
    """The letters of proc(5), such as `D`, of all threads whose names begin with `name`.

    Empty if there is no such process. `pid` may be "self".
    """
    states = []
    for thread in proc.glob(f"{pid}/task/*/stat"):
        with suppress(OSError):  # it has just ended
            before, _, after = thread.read_text().rpartition(") ")
            if before.partition("(")[2].startswith(name):
                states.append(after[:1])
    return states
