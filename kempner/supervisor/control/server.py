"""The supervisor's side of the control channel: one thread that serves all ranks.

Whoever connects has `OPENING_TIME` to prove that it knows the attempt's token; anything odd ends
the connection, with a reason in the log, and nothing else. A rank may connect again at any time:
its newest connection counts. A rank that cannot connect writes to a file instead (`file_channel`).
"""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from kempner.run.control.protocol import (
    OPENING_LIMIT,
    Alive,
    Challenge,
    FromRank,
    FromSupervisor,
    Hello,
    MessageError,
    Noted,
    PeerLost,
    Report,
    Stop,
    Usage,
    Welcome,
    decode_from_rank,
    new_nonce,
)
from kempner.run.control.transport import Connection
from kempner.run.process.logs import logger
from kempner.supervisor.control.auth import Membership
from kempner.supervisor.control.events import Connected, Disconnected, Heard, LastReport, News
from kempner.supervisor.control.file_transport import FileTransport

OPENING_TIME = 10.0
"""Seconds within which a connection must have proved that it belongs to a rank."""

STRANGERS = 64
"""Connections beyond one per rank that may be at that stage; then the oldest has to go."""

TICK = 2.0
"""Seconds between two signs of life to the ranks, and between two looks at their files."""

REFUSALS_LOGGED = 20
"""A port scanner must not fill the disk."""

LAST_WORDS = 1.0
"""Seconds that `close` goes on listening while something still comes."""


@dataclass(eq=False)
class _Peer:
    """A connection. It is a rank's once `rank` is set."""

    wire: Connection
    address: str
    opened_at: float
    nonce: str = field(default_factory=new_nonce)
    rank: int | None = None
    told_noted: int = 0


class ControlServer:
    """Listens to the ranks of one attempt and talks to them.

    `post` is called from the channel's thread with everything that the supervisor must act on;
    reports and usage are only kept, the newest of each rank.
    """

    def __init__(
        self,
        listener: socket.socket,
        members: Membership,
        files: FileTransport,
        post: Callable[[News], None],
    ) -> None:
        listener.setblocking(False)
        self._listener, self._members, self._files, self._post = listener, members, files, post
        self._seen: dict[int, LastReport] = {}
        self._usage: dict[int, Usage] = {}
        self._strangers: dict[_Peer, None] = {}  # a set that knows who came first
        self._ranks: dict[int, _Peer] = {}
        self._noted: dict[int, int] = {}
        self._orders: deque[tuple[FromSupervisor, int | None]] = deque()
        self._standing: list[tuple[FromSupervisor, float]] = []
        self._refusals = 0
        self._accepting = True
        self._closing_until: float | None = None
        self._selector = selectors.DefaultSelector()
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._alarm, selectors.EVENT_READ, self._wake_up)
        self._thread = threading.Thread(target=self._serve, name="control", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self._listener.getsockname()[1])

    def start(self) -> None:
        """Begin to listen."""
        self._thread.start()

    def tell(self, message: FromSupervisor, rank: int | None = None) -> None:
        """Send to a rank, or to all; a stop or a loss also to those that connect later.

        May be called from any thread, and returns at once. After `close` nobody is left to hear it.
        """
        if self._listener.fileno() < 0:
            return
        self._orders.append((message, rank))
        os.eventfd_write(self._alarm, 1)

    def last_reports(self) -> dict[int, LastReport]:
        """The newest report of every rank that has sent one."""
        return dict(self._seen)

    def usage(self) -> dict[int, Usage]:
        """What every rank last said that it uses of its node."""
        return dict(self._usage)

    def close(self) -> None:
        """Take in what is still coming from ranks that have ended, then hang up."""
        self._closing_until = time.monotonic() + LAST_WORDS
        os.eventfd_write(self._alarm, 1)
        self._thread.join()
        for peer in (*self._strangers, *self._ranks.values()):
            peer.wire.close()
        self._listener.close()
        self._selector.close()
        os.close(self._alarm)
        if self._refusals > REFUSALS_LOGGED:
            logger().info("total connections refused", count=self._refusals)

    def _serve(self) -> None:
        tick_at = time.monotonic()
        while True:
            ready = self._selector.select(max(0.0, tick_at - time.monotonic()))
            for key, events in ready:
                key.data(events)
            self._carry_out_orders()
            if time.monotonic() >= tick_at or self._closing_until is not None:
                self._tick()
                tick_at = time.monotonic() + TICK
            if self._closing_until is not None:
                tick_at = 0.0  # from now on nothing is waited for
                if not ready or time.monotonic() > self._closing_until:
                    return

    def _wake_up(self, events: int) -> None:
        os.eventfd_read(self._alarm)

    def _accept(self, events: int) -> None:
        try:
            connection, (address, *_) = self._listener.accept()
            peer = _Peer(Connection(connection, OPENING_LIMIT), address, time.monotonic())
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError as error:  # out of descriptors, say: try again at the next tick
            logger().warning("cannot accept a connection", error=error.strerror)
            self._selector.unregister(self._listener)
            self._accepting = False
            return
        if len(self._strangers) >= self._members.size + STRANGERS:
            self._drop(next(iter(self._strangers)), "too many connections")
        self._strangers[peer] = None
        self._selector.register(peer.wire, selectors.EVENT_READ, partial(self._serve_peer, peer))
        self._send(peer, Challenge(peer.nonce))

    def _serve_peer(self, peer: _Peer, events: int) -> None:
        if peer.wire.closed:
            return  # dropped a moment ago, by an earlier event of the same look
        try:
            if events & selectors.EVENT_READ:
                for line in peer.wire.lines():
                    self._hear(peer, decode_from_rank(line))
        except (OSError, MessageError) as error:
            self._drop(peer, str(error))
            return
        self._answer(peer)

    def _hear(self, peer: _Peer, message: FromRank) -> None:
        if peer.rank is not None:
            self._take_in(peer.rank, message)
        elif isinstance(message, Hello):
            self._admit(peer, message)
        else:
            raise MessageError("it did not authenticate")

    def _answer(self, peer: _Peer) -> None:
        """Confirm what has come, and send what had to wait."""
        if peer.wire.closed:
            return
        noted = self._noted.get(peer.rank, 0) if peer.rank is not None else 0
        if noted > peer.told_noted:
            peer.told_noted = noted
            self._send(peer, Noted(noted))
        else:
            self._send(peer)

    def _admit(self, peer: _Peer, hello: Hello) -> None:
        if refusal := self._members.refusal(hello, peer.nonce):
            raise MessageError(refusal)
        if older := self._ranks.get(hello.rank):
            self._forget(older)
        peer.rank = hello.rank
        del self._strangers[peer]
        self._ranks[peer.rank] = peer
        peer.wire.trust()
        self._files.leave(hello.rank)
        self._post(Connected(hello.rank, hello.host, hello.pid))
        proof = self._members.secret.proof_of_supervisor(peer.nonce, hello.nonce)
        self._send(peer, Welcome(proof), *self._orders_so_far())

    def _take_in(self, rank: int, message: FromRank) -> None:
        if isinstance(message, Report):
            self._seen[rank] = LastReport(message, time.monotonic())
        elif isinstance(message, Usage):
            self._usage[rank] = message
        elif isinstance(message, Hello):
            raise MessageError("it sent hello twice")
        elif message.number > self._noted.get(rank, 0):  # not one that is sent again
            self._noted[rank] = message.number
            self._post(Heard(rank, message))

    def _carry_out_orders(self) -> None:
        while self._orders:
            message, rank = self._orders.popleft()
            if rank is None and isinstance(message, Stop | PeerLost):
                self._standing.append((message, time.monotonic()))
            for peer in self._addressees(rank):
                self._send(peer, message)
            if rank is None or rank in self._files.admitted:
                self._files.tell(message)

    def _addressees(self, rank: int | None) -> list[_Peer]:
        if rank is None:
            return list(self._ranks.values())
        return [self._ranks[rank]] if rank in self._ranks else []

    def _orders_so_far(self) -> list[FromSupervisor]:
        """What a rank that joins only now must know, a deadline as it is now."""
        now = time.monotonic()
        return [
            replace(message, seconds_left=max(0.0, message.seconds_left - (now - told_at)))
            if isinstance(message, Stop) and message.seconds_left is not None
            else message
            for message, told_at in self._standing
        ]

    def _tick(self) -> None:
        """Every few seconds: a sign of life, and whatever nobody wakes this thread for."""
        if not self._accepting:
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._accepting = True
        for peer in self._addressees(None):
            if not peer.wire.sending:
                self._send(peer, Alive())
        too_old = time.monotonic() - OPENING_TIME
        for peer in [p for p in self._strangers if p.opened_at < too_old]:
            self._drop(peer, "it did not authenticate in time")
        if len(self._ranks) < self._members.size:
            self._read_files()

    def _read_files(self) -> None:
        for rank, message in self._files.news():
            if isinstance(message, Hello):
                if self._members.refusal(message, challenge="") is None and message.rank == rank:
                    self._files.admit(rank, self._orders_so_far())
                    self._post(Connected(rank, message.host, message.pid))
            elif rank in self._files.admitted:
                self._take_in(rank, message)
        self._files.tell(Alive())

    def _send(self, peer: _Peer, *messages: FromSupervisor) -> None:
        """Send, after what had to wait.

        Who has gone cannot be told anything, but may have said something first: the reading side
        takes that in, and then finds out.
        """
        try:
            peer.wire.flush()
            for message in messages:
                peer.wire.send(message)
        except TimeoutError as error:
            self._drop(peer, str(error))
            return
        except OSError:
            pass
        self._watch(peer)

    def _watch(self, peer: _Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wire.sending else 0)
        if self._selector.get_key(peer.wire).events != events:
            self._selector.modify(peer.wire, events, partial(self._serve_peer, peer))

    def _drop(self, peer: _Peer, reason: str) -> None:
        """End a connection, and say so to whom it matters."""
        if peer.wire.closed:
            return
        self._forget(peer)
        if peer.rank is not None:
            del self._ranks[peer.rank]
            self._post(Disconnected(peer.rank, reason))
            return
        del self._strangers[peer]
        self._refusals += 1
        if self._refusals <= REFUSALS_LOGGED:
            logger().info("connection refused", address=peer.address, reason=reason)

    def _forget(self, peer: _Peer) -> None:
        self._selector.unregister(peer.wire)
        peer.wire.close()
