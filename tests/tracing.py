"""Whether processes can be looked into here, as py-spy does."""

from __future__ import annotations

import subprocess
import sys
from functools import cache

from kempner.probe.activity import StackReader


@cache
def can_trace() -> bool:
    """Whether a process may be traced by one that has not started it, as an agent's helper does."""
    waits = "import threading; print(flush=True); threading.Event().wait()"
    with subprocess.Popen([sys.executable, "-c", waits], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            return StackReader().place(process.pid) is not None
        finally:
            process.kill()
