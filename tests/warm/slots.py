"""Nothing dear starts at once, and no more workers than the cores bear.

What takes seconds of processor time to come up has one of a few slots until then: as many as there
are cores, for all sessions of a user on this machine. Who waits for one too long goes on without.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

import psutil
from patience import scaled

WAIT = 60.0
WORKER_BYTES = 3 << 30
"""What a worker, its template and its ranks may need."""


def cores() -> int:
    return len(os.sched_getaffinity(0))


def workers() -> int:
    """How many workers this machine bears: one for each core, as far as the memory goes."""
    return max(1, min(cores(), psutil.virtual_memory().total // WORKER_BYTES))


_HELD = threading.local()


@contextmanager
def dear() -> Iterator[None]:
    """For the start of a template, a cluster, a world of many ranks. It may be nested."""
    with ExitStack() as stack:
        if not getattr(_HELD, "now", False):
            stack.enter_context(_slot())
        yield


@contextmanager
def _slot() -> Iterator[None]:
    folder = Path(tempfile.gettempdir(), f"kempner-tests-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    with ExitStack() as stack:
        slots = [stack.enter_context(open(folder / f"slot-{n}", "w")) for n in range(cores())]
        end = time.monotonic() + scaled(WAIT)
        while not (taken := next(filter(_take, slots), None)) and time.monotonic() < end:
            time.sleep(0.05)
        _HELD.now = True
        try:
            yield
        finally:
            _HELD.now = False
            if taken:  # by word: a forked child may have the file, too
                fcntl.flock(taken, fcntl.LOCK_UN)


def _take(slot: IO[str]) -> bool:
    try:
        fcntl.flock(slot, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
