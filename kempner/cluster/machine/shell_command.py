"""Runs a shell command of the user's, with a time limit for it and for all that it starts."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

TOLD = 2000
"""Characters at the end of its output that are kept."""

_LAST_OUTPUT = 2.0
"""Seconds for the output of a command that was killed."""


@dataclass(frozen=True)
class ShellEnd:
    """How a command ended: its exit status (negative for a signal), None if it was killed because
    it took too long, and the end of its output."""

    status: int | None
    said: str

    @property
    def failure(self) -> str:
        """What is wrong, in words; empty if nothing."""
        if self.status == 0:
            return ""
        last = self.said.strip().splitlines()[-1:]
        words = f": {last[0]}" if last else ""
        if self.status is None:
            return f"it took too long{words}"
        by = f"signal {-self.status}" if self.status < 0 else f"exit status {self.status}"
        return f"{by}{words}"


def run_shell(command: str, facts: Mapping[str, str], seconds: float) -> ShellEnd:
    """Run `command` in /bin/sh with `facts` added to the environment, for at most `seconds`.

    What it started in the foreground or background of its session is killed with it when the time
    is over. Never raises: a command that cannot be started has failed.
    """
    try:
        shell = subprocess.Popen(
            ["/bin/sh", "-c", command],
            env={**os.environ, **facts},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except (OSError, ValueError) as error:
        return ShellEnd(127, str(error))
    try:
        said, _ = shell.communicate(timeout=seconds)
        return ShellEnd(shell.returncode, _end_of(said))
    except subprocess.TimeoutExpired as late:
        said = late.stdout or b""
    with suppress(ProcessLookupError):
        os.killpg(shell.pid, signal.SIGKILL)
    with suppress(subprocess.TimeoutExpired):
        said, _ = shell.communicate(timeout=_LAST_OUTPUT)
    return ShellEnd(None, _end_of(said))


def _end_of(said: bytes) -> str:
    return said.decode(errors="replace")[-TOLD:]
