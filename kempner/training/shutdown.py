"""`ShutdownHandler`: a wish to stop, noticed at any time, acted on where it is safe.

Imports no torch, because it is installed before torch is imported.
"""

from __future__ import annotations

from enum import IntEnum

from kempner.run.signals import inbox, leave_alone


class StopReason(IntEnum):
    """Why the ranks stop. The greatest wish of any rank is the one that all follow."""

    NONE = 0
    SIGNAL = 1
    """SIGTERM, SIGINT, SIGHUP, SIGUSR1 or SIGUSR2 came."""


class ShutdownHandler:
    """Traps the stop signals and remembers them; installing it twice, or a second signal, is fine.

    Until `join_group` is called, nothing that this process does concerns anybody else: a stop
    signal then ends it at once, with exit code 75, even while it waits for peers in native code.
    Afterwards a signal is only a wish, for the ranks to vote on.
    """

    def __init__(self) -> None:
        self._signals = inbox()

    def install(self) -> None:
        """Trap the signals and leave on any of them until `join_group`."""
        self._signals.install()
        self._signals.react_with(leave_alone)

    def join_group(self) -> None:
        """From now on peers depend on this process: signals become wishes."""
        self._signals.react_with(None)

    def should_shutdown(self) -> bool:
        """Whether a stop signal has come."""
        return bool(self._signals.received)

    def wish(self) -> StopReason:
        """What this rank wants, for the vote."""
        return StopReason.SIGNAL if self.should_shutdown() else StopReason.NONE
