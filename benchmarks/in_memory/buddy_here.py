"""A launcher of local ranks that sends what they pin to itself, as agents do between two nodes."""

from __future__ import annotations

import os
from collections.abc import Callable, MutableMapping

from kempner.checkpoint.slots.memory import CopyHolder, LentSlots, SlotHolder
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import Secret
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.agents.buddy.receiver import CopyReceiver
from kempner.supervisor.launchers.agents.buddy.sender import Buddy, CopySender
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.local import LocalLauncher
from kempner.supervisor.policy.outcome import RankExit


class Lender(SlotHolder):
    """Lends each rank slots with a board."""

    def __init__(self) -> None:
        super().__init__()
        self.lent: dict[int, LentSlots] = {}

    def lend(
        self, rank: int, environ: MutableMapping[str, str], with_buddy: bool = True
    ) -> LentSlots:
        """As if there were a buddy."""
        self.lent[rank] = super().lend(rank, environ, with_buddy)
        return self.lent[rank]


class BuddyHere(LocalLauncher):
    """Sends and receives over loopback, in threads of this process."""

    def __init__(self, run: RunDirectory, size: int, share: float) -> None:
        super().__init__(run, size)
        self._slots = self._lender = Lender()
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        secret, self.copies = Secret.new(), CopyHolder()
        where = CopyReceiver(self.copies, secret, "127.0.0.1").listen("")
        self._buddy, self._sender = Buddy(*where, share), CopySender(secret)

    def start(self, launch: Launch, program: Program, post: Callable[[RankExit], None]) -> None:
        """Start the ranks, and wait for what they pin."""
        super().start(launch, program, post)
        self._sender.begin(self._buddy, self._lender.lent)
