"""Sends copies of slots (steps in memory) from a node's agent to the agent of its buddy node.

The connection is authenticated as every other one (`run.link`), with the agents' secret. Each copy
consists of two lengths, a header, the notes if they are new, the image, and a trailer with the
image's xxh3_64 and whether the slot still had the same contents at the end. The receiver answers
with one byte."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import xxhash

from kempner.checkpoint.slots.memory import (
    IMAGE_AT,
    Board,
    CopyHolder,
    LentSlots,
    Notes,
    Pin,
    SlotContents,
    SlotMemory,
    read_held,
)
from kempner.cluster.network.interfaces import route_address
from kempner.run.link.auth import Door, Secret, copies_of
from kempner.run.link.messages import OPENING_LIMIT, Caller, MessageError, Role
from kempner.run.link.wire import Connection, connect
from kempner.run.output.logs import logger
from kempner.run.process.threads import keep_running, start_thread
from kempner.supervisor.launchers.agents.messages import Buddy
from kempner.supervisor.launchers.rank_runtime import rank_address

SILENT = 10.0
"""Seconds without a byte after which a connection is closed."""

CHUNK = 4 << 20
"""Bytes per send."""

NOTES_LIMIT = 1 << 30
"""Bytes of notes above which a message is invalid."""

ARRIVED, VOID, DAMAGED = b"a", b"v", b"d"
"""The receiver's answer: the copy is whole; the slot changed meanwhile; the checksum differs."""

_LENGTHS, _TRAILER = struct.Struct("<IQ"), struct.Struct("<?Q")


@dataclass(frozen=True)
class Incoming:
    """The header of a copy."""

    held: SlotContents
    notes: Notes | None


def send_copy(wire: socket.socket, slot: int, held: SlotContents, notes: Notes | None) -> bytes:
    """Send the contents `held` of a slot; the receiver's answer. Raises `OSError`."""
    text, noted = held.encode(), b"" if notes is None else notes.encode()
    wire.sendall(_LENGTHS.pack(len(text), len(noted)) + text)
    wire.sendall(noted)
    buffer, summed, at = bytearray(CHUNK), xxhash.xxh3_64(), 0
    view = memoryview(buffer)
    while at < held.image:
        wanted = view[: min(CHUNK, held.image - at)]
        count = os.preadv(slot, [wanted], IMAGE_AT + at)
        part = (
            wanted[:count] if count else wanted
        )  # the slot was recreated, as the trailer will say
        summed.update(part)
        wire.sendall(part)
        at += len(part)
    same = held.is_in(slot)
    wire.sendall(_TRAILER.pack(same, summed.intdigest()))
    return _exactly(wire, 1)


def receive_header(wire: socket.socket) -> Incoming | None:
    """The next header; None at the end of the stream. Raises `OSError` and `MessageError`."""
    first = wire.recv(1)
    if not first:
        return None
    length, noted = _LENGTHS.unpack(first + _exactly(wire, _LENGTHS.size - 1))
    if length > IMAGE_AT or noted > NOTES_LIMIT:
        raise MessageError(f"a header of {length} and notes of {noted} bytes")
    try:
        held = SlotContents.decode(_exactly(wire, length))
    except (ValueError, TypeError, KeyError) as error:
        raise MessageError(f"a header that cannot be read: {error}") from None
    return Incoming(held, Notes.decode(_exactly(wire, noted)) if noted else None)


def receive_image(wire: socket.socket, memory: SlotMemory, length: int) -> bytes:
    """Read the image and the trailer; the answer to send. Raises `OSError`."""
    image, summed, at = memory.image[:length], xxhash.xxh3_64(), 0
    while at < length:
        count = wire.recv_into(image[at : at + CHUNK])
        if not count:
            raise ConnectionResetError("the other side has hung up")
        summed.update(image[at : at + count])
        at += count
    same, digest = _TRAILER.unpack(_exactly(wire, _TRAILER.size))
    if not same:
        return VOID
    return ARRIVED if digest == summed.intdigest() else DAMAGED


def _exactly(wire: socket.socket, length: int) -> bytes:
    received = bytearray()
    while len(received) < length:
        part = wire.recv(min(CHUNK, length - len(received)))
        if not part:
            raise ConnectionResetError("the other side has hung up")
        received += part
    return bytes(received)


PENDING_LIMIT = 64
"""Connections that may be authenticating at once."""


class CopyReceiver:
    """Receives copies on this `node`, with a thread per connection; listens from the first call of
    `listen`."""

    def __init__(
        self, copies: CopyHolder, secret: Secret, supervisor: Sequence[str], node: str
    ) -> None:
        self._copies, self._supervisor = copies, supervisor
        self._door = Door(secret, copies_of(node))
        self._listener: socket.socket | None = None
        self._opening = threading.Semaphore(PENDING_LIMIT)
        self._lock = threading.Lock()
        self._streams: dict[int, socket.socket] = {}
        self._turns: dict[int, threading.Lock] = {}

    def listen(self, interface: str) -> tuple[str, int]:
        """Start to listen, if not done, on the interface that the ranks use: the one named, or the
        best. Returns address and port. Raises `OSError`."""
        with self._lock:
            if self._listener is None:
                self._listener = socket.create_server(
                    (_address(self._supervisor, interface), 0), backlog=1024
                )
                keep_running("copies", partial(self._accept, self._listener))
        address, port = self._listener.getsockname()[:2]
        return address, port

    def _accept(self, listener: socket.socket) -> None:
        while True:
            connection, _ = listener.accept()
            if self._opening.acquire(blocking=False):
                start_thread("copies", partial(self._serve, connection))
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            try:
                try:
                    rank = self._door.admit(Connection(connection, OPENING_LIMIT)).member
                finally:
                    self._opening.release()
                connection.settimeout(None)  # a rank may save nothing for long
                with self._turn(rank, connection):
                    while self._receive(connection):
                        pass
            except (OSError, MessageError) as error:
                logger().info("a connection that brings copies is over", reason=str(error))

    def _turn(self, rank: int, connection: socket.socket) -> threading.Lock:
        """The lock for writing a rank's copies. A new connection closes the one before, which then
        releases it."""
        with self._lock:
            before, self._streams[rank] = self._streams.get(rank), connection
            turn = self._turns.setdefault(rank, threading.Lock())
        if before is not None:
            with suppress(OSError):  # it may be closed already
                before.shutdown(socket.SHUT_RDWR)
        return turn

    def _receive(self, connection: socket.socket) -> bool:
        """Receive one copy; False at the end of the stream."""
        connection.settimeout(None)
        if (incoming := receive_header(connection)) is None:
            return False
        connection.settimeout(SILENT)
        memory = self._copies.take(incoming.held)
        answer = receive_image(connection, memory, incoming.held.image)
        if answer == ARRIVED:
            self._copies.publish(memory, incoming.held, incoming.notes)
        connection.sendall(answer)
        return True


def _address(supervisor: Sequence[str], interface: str) -> str:
    """This node's address on the interface that its ranks would use; if there is none, the one from
    which it reaches the supervisor."""
    route = next(filter(None, map(route_address, supervisor)), "")
    try:
        return rank_address(interface or None, route)
    except ValueError as error:
        raise OSError(0, str(error)) from error


LOOK = 0.02
"""Seconds between two looks at a rank's board."""

AGAIN = 1.0
"""Seconds between two tries."""


class CopySender:
    """Sends copies of this node's slots to the buddy of the current attempt, from a thread per
    rank."""

    def __init__(self, secret: Secret) -> None:
        self._secret = secret
        self._over = threading.Event()

    def begin(self, buddy: Buddy, ranks: dict[int, LentSlots]) -> None:
        """Send what these ranks pin from now on, to `buddy`; stop sending to the one before."""
        self.end()
        self._over = threading.Event()
        for rank, lent in ranks.items():
            stream = _Stream(buddy, self._secret, rank, lent, self._over)
            start_thread(f"copies of rank {rank}", stream.run)

    def end(self) -> None:
        """Stop sending. Returns at once."""
        self._over.set()


class _Stream:
    """Sends the copies of one rank until `over` is set."""

    def __init__(
        self, buddy: Buddy, secret: Secret, rank: int, lent: LentSlots, over: threading.Event
    ) -> None:
        assert lent.board is not None  # it has a buddy
        self._buddy, self._rank, self._lent, self._over = buddy, rank, lent, over
        self._door = Door(secret, copies_of(buddy.node))
        self._board = Board(lent.board)
        self._wire: socket.socket | None = None
        self._noted: int | None = None
        self._failed = False

    def run(self) -> None:
        """Send what the rank pins, at most `share` of the time."""
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
        """Send a copy, retrying until it arrives; the seconds that the last try took."""
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
        """Send a copy if the slot still has contents. Raises `OSError` and `MessageError`."""
        slot = self._lent.slots[pin.slot]
        held = read_held(slot)
        if held is None:  # the run rolled back
            return
        wire = self._wire = self._wire or self._connect()
        notes = self._notes(held.plan)
        answer = send_copy(wire, slot, held, notes)
        if answer == DAMAGED:
            raise ConnectionError("a copy was damaged on its way")
        if notes is not None and answer == ARRIVED:
            self._noted = notes.plan

    def _notes(self, plan: int) -> Notes | None:
        """Rank 0's notes, if the buddy does not have them."""
        if self._rank != 0 or self._noted == plan:
            return None
        notes = Notes.read(self._lent.notes)
        return notes if notes is not None and notes.plan == plan else None

    def _connect(self) -> socket.socket:
        caller = Caller(Role.SENDER, 0, self._rank, socket.gethostname(), os.getpid())
        buddy = self._buddy
        wire = self._door.open(connect((buddy.address,), buddy.port), caller).release()
        wire.settimeout(SILENT)
        return wire

    def _hang_up(self) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire, self._noted = None, None
