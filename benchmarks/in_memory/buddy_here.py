"""A launcher of local ranks whose agent sends what they pin to itself, as two nodes' agents do."""

from __future__ import annotations

import os
from collections.abc import Sequence

from kempner.checkpoint.slots.memory import CopyHolder
from kempner.run.control.launch_env import BuddyTerms
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.agents.buddy.copies import CopyReceiver
from kempner.supervisor.launchers.agents.fleet import SlotsAway
from kempner.supervisor.launchers.agents.messages import Buddy
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.launchers.local import this_machine


class BuddyHere(Launcher):
    """Sends and receives over loopback, in threads of this process."""

    def __init__(self, run: RunDirectory, size: int, share: float) -> None:
        super().__init__(*this_machine(run, size))
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.copies = CopyHolder()
        here = self

        class Slots(SlotsAway):
            """All nodes have the same buddy."""

            def pair(self, nodes: Sequence[str], terms: BuddyTerms | None) -> dict[str, Buddy]:
                """One that listens here."""
                secret = here._fleet.secret
                where = CopyReceiver(here.copies, secret, ("127.0.0.1",), "here").listen("")
                return dict.fromkeys(nodes, Buddy("here", *where, share))

        self._slots = Slots(self._ask_for_slots)
