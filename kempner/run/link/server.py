"""The listening side of a link: one thread that serves all callers.

A new connection has `OPENING_TIME` to prove who calls. Anything unexpected closes the connection,
with a reason in the log, and has no other effect. A member may connect again at any time: its
newest connection counts. Posts are numbered, delivered once, and confirmed, here or by the owner. A
standing message is sent to all members, and to each that connects later.
"""

from __future__ import annotations

import os
import select
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, NamedTuple, Protocol, TypeVar

from kempner.run.link.auth import Door, decode_hello, new_nonce
from kempner.run.link.messages import (
    LINE_LIMIT,
    OPENING_LIMIT,
    Caller,
    Challenge,
    Hello,
    Message,
    MessageError,
    Noted,
    Post,
    encode,
)
from kempner.run.link.wire import Connection
from kempner.run.output.logs import logger
from kempner.run.process.threads import helper_thread, started

OPENING_TIME = 10.0
"""Seconds within which a connection must have proved who calls."""

PENDING_LIMIT = 64
"""Unauthenticated connections allowed beyond one per member; one more closes the oldest."""

REFUSALS_LOGGED = 20
"""So that a port scanner does not fill the disk."""

TICK = 2.0
"""Seconds between two calls of the owner's `tick`."""

_BUSY, _PAUSE_MS = 500, 10
"""Above this number of events a second, the thread pauses between two looks so that more events
gather: waking up costs more than most messages do. An order ends the pause."""

_LEAVING = 0.1
"""Seconds between two looks whether all members have hung up."""

Member = TypeVar("Member", bound=Hashable)
Heard = TypeVar("Heard", bound=Message, contravariant=True)


class ListenerOwner(Protocol[Member, Heard]):
    """Callbacks of a listener's owner. Called from the server's thread."""

    def admit(self, caller: Caller) -> tuple[Member | None, Sequence[Message]]:
        """The member that an authenticated caller is, and the messages it gets first. If the member
        is None, it gets only those and must hang up. Raises `MessageError` to refuse the caller."""

    def hear(self, member: Member, message: Heard) -> None:
        """Take in a member's message; each post comes once."""

    def disconnected(self, member: Member, why: Exception) -> None:
        """Called when a member's connection is over. It may come back."""

    def tick(self) -> None:
        """Called every few seconds."""


@dataclass(eq=False)
class _Peer(Generic[Member]):
    """A connection. It is a member's once `member` is set."""

    wire: Connection
    address: str
    opened_at: float = field(default_factory=time.monotonic)
    nonce: str = field(default_factory=new_nonce)
    caller: Caller | None = None
    member: Member | None = None
    noted: int = 0


class _Order(NamedTuple, Generic[Member]):
    """A message for a member, or for all (None); with `stands`, also for those that come later."""

    message: Message
    line: bytes
    member: Member | None
    stands: bool


class LinkServer(Generic[Member, Heard]):
    """Listens, admits callers as members through a `door`, and passes their messages to `owner`.

    `decode` decodes members' messages, in lines of at most `limit` bytes; `size` is the number of
    members expected. Without `confirms` the owner gets posts as often as they are sent, and
    confirms them.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        door: Door,
        owner: ListenerOwner[Member, Heard],
        decode: Callable[[bytes], Heard],
        size: int,
        name: str,
        confirms: bool = True,
        limit: int = LINE_LIMIT,
    ) -> None:
        self._listeners, self._door, self._owner, self._decode = listeners, door, owner, decode
        self._size, self._confirms, self._limit, self._refusals = size, confirms, limit, 0
        self._strangers: dict[_Peer[Member], None] = {}  # a set in the order of the connections
        self._members: dict[Member, _Peer[Member]] = {}
        self._noted: dict[Member, tuple[int, int]] = {}
        """For each member, its process id and the number of the last post taken in."""
        self._orders: deque[_Order[Member]] = deque()
        self._standing: list[tuple[Message, float]] = []
        self._not_accepting: list[socket.socket] = []
        self._closing_until: float | None = None
        self._farewell = b""
        self._lock = threading.Lock()
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            self._listen(listener)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        awake = lambda events: os.eventfd_read(self._alarm)  # noqa: E731
        self._selector.register(self._alarm, selectors.EVENT_READ, awake)
        self._pause = select.poll()
        self._pause.register(self._alarm, select.POLLIN)
        self._thread = helper_thread(self._serve, name)

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def start(self) -> None:
        started(self._thread)

    def tell(self, message: Message, member: Member | None = None, stands: bool = False) -> None:
        """Send to a member, if it is connected, or to all; with `stands`, also to those that
        connect later. May be called from any thread, and returns at once. Does nothing after
        `close`."""
        try:
            order = _Order(message, encode(message), member, stands)
        except MessageError as error:
            logger().error("a message cannot be sent", kind=type(message).__name__, why=str(error))
            return
        with self._lock:
            if self._closing_until is None:
                self._orders.append(order)
                os.eventfd_write(self._alarm, 1)

    def close(self, within: float, farewell: Message | None = None) -> None:
        """Take in what still arrives, then hang up. With a `farewell`, send it and wait for all
        members to hang up. Takes at most about `within` seconds."""
        with self._lock:
            if self._closing_until is not None:
                return
            self._farewell = b"" if farewell is None else encode(farewell)
            self._closing_until = time.monotonic() + within
            os.eventfd_write(self._alarm, 1)
        self._thread.join()
        for peer in (*self._strangers, *self._members.values()):
            peer.wire.close()
        for listener in self._listeners:
            listener.close()
        self._selector.close()
        os.close(self._alarm)
        if self._refusals > REFUSALS_LOGGED:
            logger().info("connections refused in all", count=self._refusals)

    def say_alive(self, message: Message) -> None:
        """Send a sign of life to each member that keeps up with reading. Like all methods below, it
        is called from the server's thread."""
        line = encode(message)
        for peer in list(self._members.values()):
            if not peer.wire.sending:
                self._send(peer, line)

    def _serve(self) -> None:
        tick_at, events_seen, busy = time.monotonic(), 0, False
        while True:
            if busy:
                self._pause.poll(_PAUSE_MS)
            ready = self._selector.select(max(0.0, tick_at - time.monotonic()))
            events_seen += len(ready)
            for key, events in ready:
                key.data(events)
            self._carry_out_orders()
            if time.monotonic() >= tick_at or self._closing_until is not None:
                self._tick()
                tick_at = time.monotonic() + TICK
                busy, events_seen = events_seen > _BUSY * TICK, 0
            if (until := self._closing_until) is not None:
                if self._farewell:
                    self._dismiss(until)
                if self._farewell or not ready or time.monotonic() > until:
                    return
                tick_at = 0.0  # from now on `select` does not wait

    def _dismiss(self, until: float) -> None:
        """Send the farewell to all members, and wait until they have hung up."""
        for listener in self._listeners:
            if listener not in self._not_accepting:
                self._selector.unregister(listener)
        self._not_accepting.clear()
        for peer in list(self._members.values()):
            self._send(peer, self._farewell)
        while self._members and time.monotonic() < until:
            for key, events in self._selector.select(_LEAVING):
                key.data(events)

    def _listen(self, listener: socket.socket) -> None:
        self._selector.register(listener, selectors.EVENT_READ, partial(self._accept, listener))

    def _accept(self, listener: socket.socket, events: int) -> None:
        try:
            connection, address = listener.accept()
            where = str(address[0]) if address else "this machine"
            peer = _Peer[Member](Connection(connection, OPENING_LIMIT), where)
        except (BlockingIOError, ConnectionAbortedError):
            return  # the caller is gone again
        except OSError as error:  # out of descriptors, say: try again at the next tick
            logger().warning("cannot accept a connection", error=error.strerror)
            self._selector.unregister(listener)
            self._not_accepting.append(listener)
            return
        if len(self._strangers) >= self._size + PENDING_LIMIT:
            self._drop(next(iter(self._strangers)), MessageError("too many connections"))
        self._strangers[peer] = None
        self._selector.register(peer.wire, selectors.EVENT_READ, partial(self._serve_peer, peer))
        self._send(peer, encode(Challenge(peer.nonce)))

    def _serve_peer(self, peer: _Peer[Member], events: int) -> None:
        if peer.wire.closed:
            return  # dropped a moment ago, by an earlier event of the same look
        try:
            if events & selectors.EVENT_READ:
                for line in peer.wire.lines():
                    self._hear(peer, line)
        except (OSError, MessageError) as error:
            self._drop(peer, error)
            return
        noted = 0 if peer.member is None else self._noted[peer.member][1]
        if self._confirms and noted > peer.noted:
            peer.noted = noted
            self._send(peer, encode(Noted(noted)))
        elif events & selectors.EVENT_WRITE:
            self._send(peer, b"")

    def _hear(self, peer: _Peer[Member], line: bytes) -> None:
        if peer.caller is None:
            self._admit(peer, decode_hello(line))
        elif (member := peer.member) is not None:  # not admitted: it was sent away
            message = self._decode(line)
            if isinstance(message, Post) and self._confirms:
                pid, noted = self._noted[member]
                if message.number <= noted:
                    return  # it was sent again
                self._noted[member] = (pid, message.number)
            self._owner.hear(member, message)

    def _admit(self, peer: _Peer[Member], hello: Hello) -> None:
        caller = hello.caller
        if refusal := self._door.refusal(hello, peer.nonce):
            raise MessageError(refusal)
        member, orders = self._owner.admit(caller)
        peer.caller, peer.member = caller, member
        peer.wire.trust(self._limit)
        if member is not None:
            if (older := self._members.get(member)) is not None:
                self._forget(older)
            if self._noted.get(member, (-1, 0))[0] != caller.pid:
                self._noted[member] = (caller.pid, 0)  # another process numbers its posts anew
            del self._strangers[peer]
            self._members[member] = peer
        now = time.monotonic()
        standing = (message.aged(now - sent_at) for message, sent_at in self._standing)
        first = (self._door.welcome(hello, peer.nonce), *standing, *orders)
        self._send(peer, b"".join(map(encode, first)))

    def _carry_out_orders(self) -> None:
        while self._orders:
            order = self._orders.popleft()
            if order.stands:
                self._standing.append((order.message, time.monotonic()))
            to = self._members if order.member is None else (order.member,)
            for peer in [self._members[member] for member in to if member in self._members]:
                self._send(peer, order.line)

    def _tick(self) -> None:

        while self._not_accepting:
            self._listen(self._not_accepting.pop())
        too_old = time.monotonic() - OPENING_TIME
        for peer in [peer for peer in self._strangers if peer.opened_at < too_old]:
            late = "it did not authenticate in time" if peer.caller is None else "it was sent away"
            self._drop(peer, MessageError(late))
        self._owner.tick()

    def _send(self, peer: _Peer[Member], line: bytes) -> None:
        """Send a line, after those that wait.

        If the caller is gone, this does nothing: what it sent before is still read, and the reading
        side then finds the connection closed.
        """
        if peer.wire.closed:
            return
        try:
            peer.wire.send_line(line)
        except TimeoutError as error:
            self._drop(peer, error)
            return
        except OSError:
            pass
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if peer.wire.sending else 0)
        if self._selector.get_key(peer.wire).events != events:
            self._selector.modify(peer.wire, events, partial(self._serve_peer, peer))

    def _drop(self, peer: _Peer[Member], why: Exception) -> None:
        """Close a connection, and tell the owner or the log."""
        if peer.wire.closed:
            return
        self._forget(peer)
        if peer.member is not None:
            del self._members[peer.member]
            self._owner.disconnected(peer.member, why)
            return
        del self._strangers[peer]
        self._refusals += 1
        if self._refusals <= REFUSALS_LOGGED:
            logger().info("connection refused", address=peer.address, reason=str(why))

    def _forget(self, peer: _Peer[Member]) -> None:
        self._selector.unregister(peer.wire)
        peer.wire.close()
