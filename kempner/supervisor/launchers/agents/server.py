"""The supervisor's side of the links to its agents: one thread, for as long as it lives."""

from __future__ import annotations

import os
import selectors
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kempner.run.control.protocol import (
    OPENING_LIMIT,
    Challenge,
    Hello,
    MessageError,
    Secret,
    Welcome,
    decode_from_rank,
)
from kempner.run.control.transport import Connection
from kempner.run.output.logs import logger
from kempner.run.process.threads import helper_thread
from kempner.supervisor.control.peers import Membership, Peer, UnprovedPeers
from kempner.supervisor.launchers.agents.messages import (
    AgentConfirmation,
    AgentHello,
    FromAgent,
    Joins,
    LeaveOrder,
    Numbered,
    ToAgent,
    decode_from_agent,
    encode,
)

TICK = 1.0
"""Seconds between two looks at connections that do not say whose they are."""

DISMISSED_WITHIN = 2.0
"""Seconds that agents get to take in the last message."""


@dataclass(frozen=True)
class AgentConnected:
    """An agent has connected, perhaps again: its step, its task there, its process; what it brings
    if it is of another job."""

    step: int
    task: int
    pid: int
    joins: Joins | None = None


@dataclass(frozen=True)
class AgentDisconnected:
    """The link of an agent is over; `hung_up` says that its process has ended, as a rule."""

    reason: str
    hung_up: bool


AgentNews = AgentConnected | AgentDisconnected | FromAgent


@dataclass(eq=False)
class _Agent:
    """A connection that has proved that it belongs to an agent; `node` once it has said whose."""

    peer: Peer
    step: int
    task: int
    node: str = ""


@dataclass
class _AgentNumbers:
    """The last number heard of an agent's process."""

    pid: int
    number: int = 0


@dataclass
class _State:
    """What other threads hand to the server's."""

    orders: list[tuple[str, ToAgent]] = field(default_factory=list)
    leaving: bool = False
    lock: threading.Lock = field(default_factory=threading.Lock)


class AgentServer:
    """Listens to agents. `hear` is called from its thread with a node and what is new of it.

    What `hear` returns for an agent that came is said to it first. `refusal` says why one of
    another job cannot join, if so.
    """

    def __init__(
        self,
        listeners: Sequence[socket.socket],
        secret: Secret,
        nodes: int,
        hear: Callable[[str, AgentNews], list[ToAgent]],
        refusal: Callable[[AgentHello], str],
    ) -> None:
        self._listeners, self._secret, self._size = listeners, secret, nodes
        self._hear, self._refusal = hear, refusal
        self._unproved = UnprovedPeers(nodes)
        self._agents: dict[str, _Agent] = {}
        self._numbers: dict[str, _AgentNumbers] = {}
        self._state = _State()
        self._selector = selectors.DefaultSelector()
        for listener in listeners:
            listener.setblocking(False)
            accept = partial(self._accept, listener)
            self._selector.register(listener, selectors.EVENT_READ, accept)
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._alarm, selectors.EVENT_READ, self._wake_up)
        self._thread = helper_thread(self._serve, "agents")
        self._thread.start()

    @property
    def port(self) -> int:
        return int(self._listeners[0].getsockname()[1])

    def tell(self, node: str, message: ToAgent) -> None:
        """Send to the agent of a node, if there is one; from any thread, without waiting. Does
        nothing after `close`."""
        with self._state.lock:
            if self._state.leaving:
                return
            self._state.orders.append((node, message))
            os.eventfd_write(self._alarm, 1)

    def close(self) -> None:
        """Send all agents away, and hang up."""
        with self._state.lock:
            if self._state.leaving:
                return
            self._state.leaving = True
            os.eventfd_write(self._alarm, 1)
        self._thread.join()

    def _serve(self) -> None:
        while not self._state.leaving:
            for key, events in self._selector.select(TICK):
                key.data(events)
            self._carry_out_orders()
            for peer in self._unproved.overdue():
                self._refuse(peer, "it did not authenticate in time")
        self._dismiss_agents()

    def _dismiss_agents(self) -> None:
        self._carry_out_orders()
        for agent in list(self._agents.values()):
            self._send(agent, LeaveOrder())
        end = time.monotonic() + DISMISSED_WITHIN
        for listener in self._listeners:
            self._selector.unregister(listener)
            listener.close()
        while self._agents and time.monotonic() < end:
            for key, events in self._selector.select(0.1):
                key.data(events)
        for peer in (*self._unproved, *(agent.peer for agent in self._agents.values())):
            peer.wire.close()
        self._selector.close()
        os.close(self._alarm)
        self._unproved.sum_up()

    def _wake_up(self, events: int) -> None:
        os.eventfd_read(self._alarm)

    def _carry_out_orders(self) -> None:
        with self._state.lock:
            orders, self._state.orders = self._state.orders, []
        for node, message in orders:
            if (agent := self._agents.get(node)) is not None:
                self._send(agent, message)

    def _accept(self, listener: socket.socket, events: int) -> None:
        try:
            connection, (address, *_) = listener.accept()
            peer = Peer(Connection(connection, OPENING_LIMIT), address, time.monotonic())
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError as error:
            logger().warning("cannot accept a connection", error=error.strerror)
            return
        if (oldest := self._unproved.oldest_over_limit()) is not None:
            self._refuse(oldest, "too many connections")
        self._unproved.add(peer)
        self._selector.register(peer.wire, selectors.EVENT_READ, partial(self._open, peer))
        try:
            peer.wire.send(Challenge(peer.nonce))
        except OSError as error:
            self._refuse(peer, str(error))

    def _open(self, peer: Peer, events: int) -> None:
        """Read from a connection that has not proved yet that it knows the token."""
        if peer.wire.closed:
            return
        try:
            for line in peer.wire.lines():
                hello = decode_from_rank(line)
                if not isinstance(hello, Hello):
                    raise MessageError("it did not authenticate")
                members = Membership(self._secret, hello.attempt, self._size)
                if refusal := members.refusal(hello, peer.nonce):
                    raise MessageError(refusal)
                self._admit(peer, hello)
                return
        except (OSError, MessageError) as error:
            self._refuse(peer, str(error))

    def _admit(self, peer: Peer, hello: Hello) -> None:
        peer.wire.send(Welcome(self._secret.proof_of_supervisor(peer.nonce, hello.nonce)))
        peer.wire.trust()
        self._unproved.remove(peer)
        agent = _Agent(peer, hello.attempt, hello.rank)
        self._selector.modify(peer.wire, selectors.EVENT_READ, partial(self._attend, agent))

    def _refuse(self, peer: Peer, reason: str) -> None:
        self._selector.unregister(peer.wire)
        peer.wire.close()
        self._unproved.refuse(peer, reason)

    def _attend(self, agent: _Agent, events: int) -> None:
        """An agent says something, or takes something again."""
        if agent.peer.wire.closed:
            return
        try:
            if events & selectors.EVENT_READ:
                for line in agent.peer.wire.lines():
                    self._take_in(agent, decode_from_agent(line))
            agent.peer.wire.flush()
        except (OSError, MessageError) as error:
            # Reset, if it had not read everything; an agent that lives is back at once.
            self._drop(agent, str(error), isinstance(error, ConnectionError))
            return
        self._watch(agent)

    def _take_in(self, agent: _Agent, message: FromAgent) -> None:
        if isinstance(message, AgentHello):
            self._welcome(agent, message)
        elif not agent.node:
            raise MessageError("it did not say whose agent it is")
        elif isinstance(message, Numbered):
            heard = self._numbers[agent.node]
            if message.number > heard.number:
                heard.number = message.number
                self._hear(agent.node, message)
            self._send(agent, AgentConfirmation(message.number))
        else:
            self._hear(agent.node, message)

    def _welcome(self, agent: _Agent, hello: AgentHello) -> None:
        if hello.joins is not None and (refusal := self._refusal(hello)):
            self._send(agent, LeaveOrder(refusal))
            return
        if (older := self._agents.get(hello.node)) is not None:
            if older.step > agent.step:  # it was given up, and has a successor
                self._send(agent, LeaveOrder())
                return
            self._drop(older, "there is a newer connection", hung_up=False)
        agent.node = hello.node
        self._agents[hello.node] = agent
        if hello.node not in self._numbers or self._numbers[hello.node].pid != hello.pid:
            self._numbers[hello.node] = _AgentNumbers(hello.pid)
        for message in self._hear(
            hello.node, AgentConnected(agent.step, agent.task, hello.pid, hello.joins)
        ):
            self._send(agent, message)

    def _send(self, agent: _Agent, message: ToAgent) -> None:
        if agent.peer.wire.closed:
            return
        try:
            agent.peer.wire.send_line(encode(message))
        except OSError:
            return  # the reading side finds out why
        self._watch(agent)

    def _watch(self, agent: _Agent) -> None:
        wire = agent.peer.wire
        if wire.closed:
            return
        events = selectors.EVENT_READ | (selectors.EVENT_WRITE if wire.sending else 0)
        if self._selector.get_key(wire).events != events:
            self._selector.modify(wire, events, partial(self._attend, agent))

    def _drop(self, agent: _Agent, reason: str, hung_up: bool) -> None:
        self._selector.unregister(agent.peer.wire)
        agent.peer.wire.close()
        if self._agents.get(agent.node) is agent:
            del self._agents[agent.node]
            self._hear(agent.node, AgentDisconnected(reason, hung_up))
