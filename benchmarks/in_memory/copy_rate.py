"""How fast a rank's step goes to its buddy, beside a plain socket that sends the same bytes.

    python benchmarks/in_memory/copy_rate.py [--megabytes 512] [--rounds 5]

Both over loopback, one connection, sender and receiver in threads of one process; in turns. The
processor time is that of both ends together.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

from kempner.checkpoint.format.manifest import TrainState
from kempner.checkpoint.slots.memory import (
    Board,
    Branch,
    CopyHolder,
    SlotContents,
    SlotHolder,
    SlotMemory,
)
from kempner.run.link.auth import Secret
from kempner.supervisor.launchers.agents.buddy.copies import CHUNK, CopyReceiver, CopySender
from kempner.supervisor.launchers.agents.messages import Buddy

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

LOOK = 0.001
"""Seconds between two looks whether a copy has arrived."""


class ToBuddy:
    """What kempner does: the rank's slot, the agent's sender, the other agent's receiver."""

    def __init__(self, size: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        self.copies, secret = CopyHolder(), Secret.new()
        address, port = CopyReceiver(self.copies, secret, ("127.0.0.1",), "here").listen("")
        lent = SlotHolder().lend(1, {}, with_buddy=True)
        assert lent is not None
        assert lent.board is not None
        self.lent = lent
        self.board, self.step, self.size = Board(lent.board), 0, size
        self.slots = [SlotMemory.grown(slot, size) for slot in lent.slots[:2]]
        for slot in self.slots:
            slot.image[:] = os.urandom(1 << 20) * (size >> 20)
        CopySender(secret).begin(Buddy("here", address, port, 1.0), {1: self.lent})

    def __call__(self) -> None:
        while not self.board.may_pin:
            time.sleep(LOOK)
        self.step += 1
        number = self.step % 2
        self.slots[number].withdraw()
        held = SlotContents(TrainState(self.step), Branch("now"), 1, 2, 0, 0, self.size)
        self.slots[number].publish(held)
        self.board.pin(number)
        while not self.board.may_pin:
            time.sleep(LOOK)
        arrived = [memory.held() for memory in self.copies.slots()[1]]
        assert held in arrived


class Plain:
    """A socket, and nothing else."""

    def __init__(self, size: int) -> None:
        listener = socket.create_server(("127.0.0.1", 0))
        self.near = socket.create_connection(listener.getsockname())
        self.far, _ = listener.accept()
        self.source = memoryview(bytearray(os.urandom(1 << 20) * (size >> 20)))
        self.place = memoryview(bytearray(size))

    def __call__(self) -> None:
        receiver = threading.Thread(target=self._receive)
        receiver.start()
        for at in range(0, len(self.source), CHUNK):
            self.near.sendall(self.source[at : at + CHUNK])
        receiver.join()

    def _receive(self) -> None:
        at = 0
        while at < len(self.place):
            at += self.far.recv_into(self.place[at : at + CHUNK])


def timed(send: Callable[[], None]) -> tuple[float, float]:
    """Wall and processor time."""
    wall, busy = time.perf_counter(), time.process_time()
    send()
    return time.perf_counter() - wall, time.process_time() - busy


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    records.add_option(parser)
    arguments = parser.parse_args()
    size = arguments.megabytes << 20
    ways: dict[str, Callable[[], None]] = {
        "to a buddy": ToBuddy(size),
        "a plain socket": Plain(size),
    }
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    for number in range(-2, arguments.rounds):  # both copies have their pages after two
        for name, send in ways.items():
            measured = timed(send)
            if number >= 0:
                times[name].append(measured)
    rows = []
    for name, each in times.items():
        wall, busy = (statistics.median(column) for column in zip(*each, strict=True))
        pairs = list(zip(each, times["a plain socket"], strict=True))
        row = {"sent": name, "MB": arguments.megabytes, "GB/s": size / wall / 1e9}
        row["processor s a GB"] = busy / size * 1e9
        row["time, to the socket's"] = statistics.median(a[0] / b[0] for a, b in pairs)
        row["processor time, to its"] = statistics.median(a[1] / b[1] for a, b in pairs)
        rows.append(row)
    proves = ("kempner/checkpoint/slots", "kempner/supervisor/launchers/agents/buddy")
    records.result(arguments.record, "copies", proves, rows)


if __name__ == "__main__":
    main()
