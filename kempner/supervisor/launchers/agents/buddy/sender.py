"""Sends what the ranks of this node pin to the agent of another node, its buddy."""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass

from kempner.checkpoint.slots.memory import Board, LentSlots, Notes, Pin, read_held
from kempner.run.control.handshake import open_wire
from kempner.run.control.launch_env import Control, Launch
from kempner.run.control.protocol import MessageError, Secret
from kempner.run.output.logs import logger
from kempner.run.process.threads import start_thread
from kempner.run.record.attempts import Attempt
from kempner.supervisor.launchers.agents.buddy.wire import ARRIVED, DAMAGED, SILENT, send_copy

LOOK = 0.02
"""Seconds between two looks at a board."""

AGAIN = 1.0
"""Seconds between two tries."""


@dataclass(frozen=True)
class Buddy:
    """Where the agent that keeps copies listens, and the share of the time in which it is sent to:
    that decides how many steps lie between two that are sent.
    """

    address: str
    port: int
    share: float

    @classmethod
    def parse(cls, text: str) -> Buddy:
        """What `text` has written."""
        address, port, share = text.split()
        return cls(address, int(port), float(share))

    @property
    def text(self) -> str:
        """As the value of the variable `BUDDY`: `ADDRESS PORT SHARE`."""
        return f"{self.address} {self.port} {self.share}"


class CopySender:
    """Sends to one buddy after the other, each rank's copies from a thread."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._over = threading.Event()

    def begin(self, buddy: Buddy, ranks: dict[int, LentSlots]) -> None:
        """Send what these ranks pin; what others have pinned before is sent no more."""
        self.end()
        self._over = threading.Event()
        for rank, lent in ranks.items():
            stream = _Stream(buddy, self._secret, rank, lent, self._over)
            start_thread(f"copies of rank {rank}", stream.run)

    def end(self) -> None:
        """Send no more. Returns at once."""
        self._over.set()


class _Stream:
    """The copies of one rank, until it is over."""

    def __init__(
        self, buddy: Buddy, secret: Secret, rank: int, lent: LentSlots, over: threading.Event
    ) -> None:
        assert lent.board is not None  # it has a buddy
        self._buddy, self._rank, self._lent, self._over = buddy, rank, lent, over
        self._launch = Launch(Attempt(0, ""), Control((buddy.address,), buddy.port, secret))
        self._board = Board(lent.board)
        self._wire: socket.socket | None = None
        self._noted: int | None = None
        self._failed = False

    def run(self) -> None:
        """Wait for one pin after the other."""
        sent = 0
        if not self._board.pinned.number:
            self._board.allow()
        while not self._over.wait(LOOK):
            pin = self._board.pinned
            if pin.number == sent:
                continue
            took = self._deliver(pin)
            sent = pin.number
            if not self._over.wait(took / self._buddy.share - took):
                self._board.allow()
        self._hang_up()

    def _deliver(self, pin: Pin) -> float:
        """Send until it has arrived, or is over; the seconds that the last try took."""
        while not self._over.is_set():
            began = time.monotonic()
            try:
                self._send(pin)
            except (OSError, MessageError) as error:
                self._hang_up()
                if not self._failed:
                    logger().warning("a buddy gets no copies", rank=self._rank, reason=str(error))
                self._failed = True
                self._over.wait(AGAIN)
            else:
                if self._failed:
                    logger().info("the buddy gets copies again", rank=self._rank)
                self._failed = False
                return time.monotonic() - began
        return 0.0

    def _send(self, pin: Pin) -> None:
        """Send what is pinned, if it is still there. Raises `OSError` and `MessageError`."""
        slot = self._lent.slots[pin.slot]
        held = read_held(slot)
        if held is None:  # the run went back
            return
        wire = self._wire = self._wire or self._connect()
        notes = self._notes(held.plan)
        answer = send_copy(wire, slot, held, notes)
        if answer == DAMAGED:
            raise ConnectionError("a copy was damaged on its way")
        if notes is not None and answer == ARRIVED:
            self._noted = notes.plan

    def _notes(self, plan: int) -> Notes | None:
        """Those of rank 0, if the buddy does not have them."""
        if self._rank != 0 or self._noted == plan:
            return None
        notes = Notes.read(self._lent.notes)
        return notes if notes is not None and notes.plan == plan else None

    def _connect(self) -> socket.socket:
        wire = open_wire(self._launch, self._rank).release()
        wire.settimeout(SILENT)
        return wire

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire, self._noted = None, None
