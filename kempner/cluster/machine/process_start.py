"""When this process began, which may be long before it became what it is."""

from __future__ import annotations

import os
import time
from pathlib import Path

_STARTTIME = 22 - 3
"""Where the field `starttime` of proc(5) is among those after the name, which may hold blanks."""


def process_began(proc: Path = Path("/proc")) -> float | None:
    """In seconds since the epoch, to a hundredth of a second; None where the system does not say.

    What a process was before an exec counts, such as the batch script of a job.
    """
    try:
        stat = (proc / "self" / "stat").read_text()
        ticks = int(stat.rpartition(")")[2].split()[_STARTTIME])
        age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
    return time.time() - age if age >= 0 else None
