"""Notices the end of a process that is not the parent, as a forked rank's supervisor is not."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable


def call_at_end_of(pid: int, react: Callable[[], object]) -> None:
    """Call `react` once a process of this machine has ended, from a thread; now if it is gone."""
    try:
        ended = os.pidfd_open(pid)
    except ProcessLookupError:
        react()
        return

    def wait() -> None:
        poll = select.poll()
        poll.register(ended, select.POLLIN)
        while not poll.poll():
            pass
        react()

    threading.Thread(target=wait, name="parent", daemon=True).start()
