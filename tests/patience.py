"""How long the tests wait for what should come.

A deadline ends what hangs, and nothing else: no test tells anything by it. Each is written in
seconds of a quiet machine of the reference, and `scaled` makes of them the seconds that pass
here: as many times more as this machine is slower at the start of the session, and then some,
since load may come later. What does not hang never notices.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from harness import Job

REFERENCE = 0.25
"""Seconds of `_trial` on two quiet cores of an AMD EPYC (family 26) with Python 3.11."""

TRIAL = "import asyncio, email.parser, http.client, numpy, sqlite3, unittest.mock, xml.dom.minidom"

RESERVE = 3.0
LARGEST = 20.0
"""A machine that seems slower than this was busy for a moment: a hang must end within hours."""

ENOUGH = 1200.0
"""Seconds after which what was to take less hangs, on any machine."""

SLOWNESS = "KEMPNER_TESTS_SLOWNESS"
"""Where the workers and the processes of a session find what it measured."""


def scaled(seconds: float) -> float:
    """How long to wait here for what takes at most `seconds` on a quiet reference machine."""
    return min(seconds * RESERVE * slowness(), max(seconds, ENOUGH))


def slowed(seconds: float, most: float = ENOUGH) -> float:
    """For a limit of kempner's own that a test waits for: as late as here a sound run needs it.

    `most`, in seconds, is for a limit that has to come before another one of kempner's.
    """
    return min(round(seconds * slowness(), 1), most)


def slowness() -> float:
    """How many times longer this machine takes than the reference; 1 for all that are faster."""
    if SLOWNESS not in os.environ:
        measured = _trial() / REFERENCE
        os.environ[SLOWNESS] = f"{min(max(measured, 1.0), LARGEST):.2f}"
    return float(os.environ[SLOWNESS])


def _trial() -> float:
    """Seconds of a start of Python with some imports, on all cores at once."""
    began = time.monotonic()
    command = [sys.executable, "-I", "-c", TRIAL]
    trials = [subprocess.Popen(command) for _ in range(len(os.sched_getaffinity(0)))]
    for trial in trials:
        trial.wait()
    return time.monotonic() - began


PAUSE, LONGEST_PAUSE = 20, 1.0
"""Between two looks, as many times the CPU time of a look, and as many seconds at most: what waits
leaves the machine to what is waited for."""


def wait_until(
    condition: Callable[[], Any],
    what: str,
    deadline: float = 120.0,
    job: Job | None = None,
    interval: float = 0.01,
) -> Any:
    """Poll until `condition()` is truthy and return it; fail after `scaled(deadline)` seconds.

    Fails at once if `job` has ended: what is waited for will not come.
    """
    deadline = scaled(deadline)
    end = time.monotonic() + deadline
    while True:
        began = cpu_seconds()
        if value := condition():
            return value
        cost = cpu_seconds() - began
        if job is not None and job.process.poll() is not None:
            if value := condition():
                return value
            raise AssertionError(f"ended before: {what}\n{job.output()}")
        if time.monotonic() > end:
            raise AssertionError(
                f"not within {deadline:.0f} s: {what}\n{job.output() if job else ''}"
            )
        time.sleep(max(interval, min(PAUSE * cost, LONGEST_PAUSE)))


def cpu_seconds() -> float:
    """CPU time of this thread and of the processes that this one has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.thread_time() + children.ru_utime + children.ru_stime
