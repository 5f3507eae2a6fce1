"""The supervisor's side of the control channel: one thread that serves all ranks.

A new connection has `peers.OPENING_TIME` to prove that it knows the attempt's token. Anything
unexpected closes the connection, with a reason in the log, and has no other effect. A rank may
connect again at any time: its newest connection counts. One that cannot connect writes to a file
(`file_transport`).

What ranks are told: at once those that are there, and later those that join.

What the ranks of an attempt have said, over whatever way it came.
"""

from __future__ import annotations

import os
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
)
from kempner.run.control.transport import Connection, HungUpError
from kempner.run.output.logs import logger
from kempner.run.process.threads import helper_thread
from kempner.supervisor.control.events import Connected, Disconnected, LastReport, News, RankMessage
from kempner.supervisor.control.file_transport import FileTransport
from kempner.supervisor.control.peers import Membership, Peer, UnprovedPeers
from kempner.supervisor.policy.outcome import RankExit


class Orders:
    """Messages that wait to be sent, and those that hold for the rest of the attempt."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[FromSupervisor, int | None]] = deque()
        self._standing: list[tuple[FromSupervisor, float]] = []

    def add(self, message: FromSupervisor, rank: int | None) -> None:
        """To be sent to a rank, or to all (None); may be called from any thread."""
        self._waiting.append((message, rank))

    def take(self) -> Iterator[tuple[FromSupervisor, int | None]]:
        """What is to be sent now, and to whom; a stop or a loss that all are told stands."""
        while self._waiting:
            message, rank = self._waiting.popleft()
            if rank is None and isinstance(message, Stop | PeerLost):
                self._standing.append((message, time.monotonic()))
            yield message, rank

    def so_far(self) -> list[FromSupervisor]:
        """What a rank that joins only now must know, a deadline as it is now."""
        now = time.monotonic()
        return [
            replace(message, seconds_left=max(0.0, message.seconds_left - (now - told_at)))
            if isinstance(message, Stop) and message.seconds_left is not None
            else message
            for message, told_at in self._standing
        ]


class RankInbox:
    """Keeps the newest report and usage of each rank, and hands the rest on to `post`, once.

    Written by one thread; the others may read `last_reports` and `usage`.
    """

    def __init__(self, post: Callable[[News], None]) -> None:
        self.post = post
        self._last_reports: dict[int, LastReport] = {}
        self._usage: dict[int, Usage] = {}
        self._noted: dict[int, int] = {}

    def last_reports(self) -> dict[int, LastReport]:
        """The newest report of every rank that has sent one."""
        return dict(self._last_reports)

    def usage(self) -> dict[int, Usage]:
        """What every rank last said that it uses of its node."""
        return dict(self._usage)

    def noted(self, rank: int) -> int:
        """The number of the last message of a rank that was handed on; 0 before the first."""
        return self._noted.get(rank, 0)

    def take_in(self, rank: int, message: FromRank) -> None:
        """A rank that is known has said something; raises `MessageError` if it makes no sense."""
        if isinstance(message, Report):
            self._last_reports[rank] = LastReport(message, time.monotonic())
        elif isinstance(message, Usage):
            self._usage[rank] = message
        elif isinstance(message, Hello):
            raise MessageError("it says hello twice")
        elif message.number > self.noted(rank):  # not one that is sent again
            self._noted[rank] = message.number
            self.post(RankMessage(rank, message))


TICK = 2.0
"""Seconds between two signs of life to the ranks, and between two looks at their files."""

LAST_WORDS = 1.0
"""Seconds that `close` goes on listening while something still comes."""


class ControlServer:
    """Listens to the ranks of one attempt and talks to them.

    `post` is called from the channel's thread with everything that the supervisor must act on;
    reports and usage are only kept, the newest of each rank.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        members: Membership,
        files: FileTransport,
        post: Callable[[News], None],
    ) -> None:
        self._listeners, self._members, self._files = listeners, members, files
        self._inbox, self._orders = RankInbox(post), Orders()
        self._unproved, self._ranks = UnprovedPeers(members.size), dict[int, Peer]()
        self._not_accepting: list[socket.socket] = []
        self._closing_until: float | None = None
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._listen(listener)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._alarm, selectors.EVENT_READ, self._wake_up)
        self._thread = helper_thread(self._serve, "control")

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def start(self) -> None:
        self._thread.start()

    def tell(self, message: FromSupervisor, rank: int | None = None) -> None:
        """Send to a rank, or to all; a stop or a loss also to those that connect later.

        May be called from any thread, and returns at once. Does nothing after `close`.
        """
        if self._listeners[0].fileno() < 0:
            return
        self._orders.add(message, rank)
        os.eventfd_write(self._alarm, 1)

    def last_reports(self) -> dict[int, LastReport]:
        """The newest report of every rank that has sent one."""
        return {**self._files.reports(), **self._inbox.last_reports()}

    def interpret(self, end: RankExit, *, look: bool = False) -> RankExit:
        """What the end of a rank means that has not reported; `look` at what it has said last."""
        return self._files.interpret(end, look)

    def usage(self) -> dict[int, Usage]:
        """What every rank last said that it uses of its node."""
        return self._inbox.usage()

    def close(self) -> None:
        """Take in what is still coming from ranks that have ended, then hang up."""
        self._closing_until = time.monotonic() + LAST_WORDS
        os.eventfd_write(self._alarm, 1)
        self._thread.join()
        for peer in (*self._unproved, *self._ranks.values()):
            peer.wire.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        os.close(self._alarm)
        self._unproved.sum_up()

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

    def _listen(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, events: int) -> None:
        try:
            connection, (address, *_) = listener.accept()
            peer = Peer(Connection(connection, OPENING_LIMIT), address, time.monotonic())
        except (BlockingIOError, ConnectionAbortedError):
            return  # it has gone again
        except OSError as error:  # out of descriptors, say: try again at the next tick
            logger().warning("cannot accept a connection", error=error.strerror)
            self._selector.unregister(listener)
            self._not_accepting.append(listener)
            return
        if (oldest := self._unproved.oldest_over_limit()) is not None:
            self._drop(oldest, "too many connections")
        self._unproved.add(peer)
        self._selector.register(peer.wire, selectors.EVENT_READ, partial(self._serve_peer, peer))
        self._send(peer, Challenge(peer.nonce))

    def _serve_peer(self, peer: Peer, events: int) -> None:
        if peer.wire.closed:
            return  # dropped a moment ago, by an earlier event of the same look
        try:
            if events & selectors.EVENT_READ:
                for line in peer.wire.lines():
                    self._hear(peer, decode_from_rank(line))
        except (OSError, MessageError) as error:
            self._drop(peer, str(error), hung_up=isinstance(error, HungUpError))
            return
        self._answer(peer)

    def _hear(self, peer: Peer, message: FromRank) -> None:
        if peer.rank is not None:
            self._inbox.take_in(peer.rank, message)
        elif isinstance(message, Hello):
            self._admit(peer, message)
        else:
            raise MessageError("it did not authenticate")

    def _answer(self, peer: Peer) -> None:
        """Confirm what has come, and send what had to wait."""
        if peer.wire.closed:
            return
        noted = self._inbox.noted(peer.rank) if peer.rank is not None else 0
        if noted > peer.told_noted:
            peer.told_noted = noted
            self._send(peer, Noted(noted))
        else:
            self._send(peer)

    def _admit(self, peer: Peer, hello: Hello) -> None:
        if refusal := self._members.refusal(hello, peer.nonce):
            raise MessageError(refusal)
        if older := self._ranks.get(hello.rank):
            self._forget(older)
        peer.rank = hello.rank
        self._unproved.remove(peer)
        self._ranks[peer.rank] = peer
        peer.wire.trust()
        self._files.leave(hello.rank)
        self._inbox.post(Connected(hello.rank, hello.host, hello.pid))
        proof = self._members.secret.proof_of_supervisor(peer.nonce, hello.nonce)
        self._send(peer, Welcome(proof), *self._orders.so_far())

    def _carry_out_orders(self) -> None:
        for message, rank in self._orders.take():
            for peer in self._addressees(rank):
                self._send(peer, message)
            if rank is None or rank in self._files.admitted:
                self._files.tell(message)

    def _addressees(self, rank: int | None) -> list[Peer]:
        if rank is None:
            return list(self._ranks.values())
        return [self._ranks[rank]] if rank in self._ranks else []

    def _tick(self) -> None:
        """Every few seconds: send a sign of life, and do what no event wakes this thread for."""
        while self._not_accepting:
            self._listen(self._not_accepting.pop())
        for peer in self._addressees(None):
            if not peer.wire.sending:
                self._send(peer, Alive())
        for peer in self._unproved.overdue():
            self._drop(peer, "it did not authenticate in time")
        if len(self._ranks) < self._members.size:
            self._read_files()

    def _read_files(self) -> None:
        for rank, message in self._files.news():
            if isinstance(message, Hello):
                if self._members.refusal(message, challenge="") is None and message.rank == rank:
                    self._files.admit(rank, self._orders.so_far())
                    self._inbox.post(Connected(rank, message.host, message.pid))
            elif rank in self._files.admitted:
                self._inbox.take_in(rank, message)
        self._files.tell(Alive())

    def _send(self, peer: Peer, *messages: FromSupervisor) -> None:
        """Send, after what had to wait.

        A rank that is gone gets nothing, but may have sent something first: the reading side takes
        that in, and then finds the connection closed.
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

    def _watch(self, peer: Peer) -> None:
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wire.sending else 0)
        if self._selector.get_key(peer.wire).events != events:
            self._selector.modify(peer.wire, events, partial(self._serve_peer, peer))

    def _drop(self, peer: Peer, reason: str, hung_up: bool = False) -> None:
        """End a connection, and say so to whom it matters."""
        if peer.wire.closed:
            return
        self._forget(peer)
        if peer.rank is not None:
            del self._ranks[peer.rank]
            self._inbox.post(Disconnected(peer.rank, reason, hung_up))
            return
        self._unproved.refuse(peer, reason)

    def _forget(self, peer: Peer) -> None:
        self._selector.unregister(peer.wire)
        peer.wire.close()
