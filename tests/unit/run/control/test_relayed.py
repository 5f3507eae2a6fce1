"""A handshake that is relayed from one listener to another is refused, whichever two they are.

All listeners know the same secret here, so that nothing but their keys tells them apart.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

import pytest
from callers import LOOPBACK, SIZE, Relay, dial

from kempner.checkpoint.slots.memory import CopyHolder
from kempner.run.control.protocol import Disconnected, RankNews
from kempner.run.link.auth import AGENTS, Door, Endpoint, Secret, copies_of, ranks_at
from kempner.run.link.messages import Caller, Joins, MessageError, Role
from kempner.run.link.wire import listen
from kempner.supervisor.control.rank_hub import RankHub
from kempner.supervisor.launchers.agents.buddy.copies import CopyReceiver
from kempner.supervisor.launchers.agents.fleet import AgentConnected, AgentNews, AgentServer
from kempner.supervisor.launchers.agents.messages import ToAgent

HERE, THERE = "node1", "node2"
CALLS: dict[str, tuple[Role, str]] = {
    "rank": (Role.RANK, "ranks of node1"),
    "rank of another node": (Role.RANK, "ranks of node2"),
    "agent": (Role.AGENT, "agents"),
    "agent of another job": (Role.GUEST, "agents"),
    "copies for node1": (Role.SENDER, "copies of node1"),
    "copies for node2": (Role.SENDER, "copies of node2"),
}
PORTS = ("ranks of node1", "ranks of node2", "agents", "copies of node1", "copies of node2")


@dataclass
class Listeners:
    """With one secret, and what those of ranks and agents have heard."""

    secret: Secret
    ports: dict[str, int | str]
    heard: list[object]

    def admitted(self) -> list[object]:
        """Who was let in; that one whose call was taken before has gone may be heard of late."""
        return [told for told in self.heard if not _is_gone(told)]

    def endpoint(self, port: str) -> Endpoint:
        """What a listener is for."""
        if port.startswith("ranks"):
            return ranks_at(str(self.ports[port]))
        return AGENTS if port == "agents" else copies_of(port.removeprefix("copies of "))


def _is_gone(told: object) -> bool:
    return isinstance(told, RankNews) and isinstance(told.news, Disconnected)


@pytest.fixture(scope="module")
def listeners() -> Iterator[Listeners]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    secret, heard = Secret.new(), list[object]()

    def hear(node: str, news: AgentNews) -> list[ToAgent]:
        heard.extend([node] if isinstance(news, AgentConnected) else [])
        return []

    server = AgentServer(listen([LOOPBACK], None), secret, SIZE, hear, lambda told: "")
    ports: dict[str, int | str] = {"agents": server.port}
    hubs = {node: RankHub(heard.append, here=True) for node in (HERE, THERE)}
    for node, hub in hubs.items():
        ports[f"ranks of {node}"] = hub.begin(3, SIZE, secret)
        receiver = CopyReceiver(CopyHolder(), secret, (LOOPBACK,), node)
        _, ports[f"copies of {node}"] = receiver.listen("lo")
    yield Listeners(secret, ports, heard)
    server.close()
    for hub in hubs.values():
        hub.end()
    del os.environ["GLOO_SOCKET_IFNAME"]


def call(listeners: Listeners, who: str, place: int | str) -> bool:
    """Whether both sides accept each other where `who` calls at a port or socket."""
    role, port = CALLS[who]
    joins = Joins("8", 2, None) if role is Role.GUEST else None
    caller = Caller(role, 3, 1, HERE, os.getpid(), joins)
    try:
        wire = Door(listeners.secret, listeners.endpoint(port)).open(dial(place), caller)
    except (OSError, MessageError):
        return False
    wire.close()
    return True


@pytest.mark.parametrize("port", PORTS)
@pytest.mark.parametrize("who", CALLS)
def test_only_the_listener_that_a_caller_means_takes_its_relayed_handshake(
    listeners: Listeners, who: str, port: str
) -> None:
    listeners.heard.clear()
    with Relay(listeners.ports[port]) as relay:
        assert call(listeners, who, relay.place) is (port == CALLS[who][1])
    if port != CALLS[who][1]:
        assert listeners.admitted() == []


def test_an_agent_is_not_ordered_about_by_its_own_copies_port(listeners: Listeners) -> None:
    """Another user who has taken a dead supervisor's port lets the agent talk to itself."""
    with socket.create_server((LOOPBACK, 0)) as taken:
        threading.Thread(
            target=reflect, args=(taken, listeners.ports["copies of node1"]), daemon=True
        ).start()
        assert not call(listeners, "agent", taken.getsockname()[1])


def reflect(taken: socket.socket, port: int) -> None:
    """Pass the challenge, the hello and the answer on, each as it comes."""
    near, _ = taken.accept()
    with near, socket.create_connection((LOOPBACK, port)) as far, suppress(OSError):
        near.sendall(far.recv(4096))
        far.sendall(near.recv(4096))
        near.sendall(far.recv(4096))
