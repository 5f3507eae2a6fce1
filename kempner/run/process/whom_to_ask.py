"""Whom to send a SIGTERM that is meant for a program: a wrapper may stand in front of it."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path

import psutil


def whom_to_ask(process: psutil.Process) -> list[tuple[psutil.Process, bool]]:
    """A process, each with whether it traps the signal, and those below one that does not."""
    with suppress(psutil.Error):
        if _traps(process.pid, signal.SIGTERM):
            return [(process, True)]
        below = (found for child in process.children() for found in whom_to_ask(child))
        return [(process, False), *below]
    return []


def _traps(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal (proc(5), SigCgt)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False  # it has just gone
    masks = (line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:"))
    return bool(int(next(masks, "0"), 16) >> (number - 1) & 1)
