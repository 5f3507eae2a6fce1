"""Both ends of the control channel in one process: a supervisor, its ranks, and strangers."""

from __future__ import annotations

import fcntl
import os
import queue
import socket
import termios
import threading
from array import array
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import wait_until
from patience import scaled

from kempner.run.control.client import ControlClient, Reactions, caller_of
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    FromSupervisor,
    News,
    RankNews,
    Stop,
    SummedReports,
    TellRanks,
)
from kempner.run.link.auth import Door, Secret, new_nonce, ranks_at
from kempner.run.link.messages import (
    Alive,
    Caller,
    Challenge,
    Hello,
    Message,
    Role,
    Welcome,
    decoder,
    encode,
)
from kempner.run.link.wire import Connection, connect_here, listen, listen_here
from kempner.run.output import logs
from kempner.run.record.attempts import Attempt
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.rank_connections import RankChannel
from kempner.supervisor.launchers.agents.fleet import AgentDisconnected, Fleet, FleetNews
from kempner.supervisor.launchers.agents.messages import ToAgent
from kempner.supervisor.launchers.agents.node_agent import AgentLink, SupervisorPlace

SIZE = 4
LOOPBACK = "127.0.0.1"
NODE = "node1"
_DECODE = decoder(FromSupervisor | Challenge | Welcome)


def door_of(launch: Launch) -> Door:
    """Where a rank calls."""
    return Door(launch.secret, ranks_at(launch.socket))


def introduce(launch: Launch, rank: int, challenge: str) -> Hello:
    """What a rank answers to a challenge."""
    return door_of(launch).introduce(caller_of(launch, rank), challenge)


def open_wire(launch: Launch, rank: int) -> Connection:
    """A rank's connection to its agent."""
    return door_of(launch).open(connect_here(launch.socket), caller_of(launch, rank))


class Supervisor:
    """A channel of attempt 3 over four ranks, by way of one agent, and what it hands on."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.attempt(3).mkdir(parents=True)
        logs.open_log(self.run.supervisor_log(3))
        self.secret = Secret.new()
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        self.fleet = Fleet(listen([LOOPBACK], None), 1, self._hear)
        self.channel = RankChannel(3, SIZE, self.news.put, self.fleet.tell_ranks)
        place = SupervisorPlace((LOOPBACK,), self.fleet.port, self.fleet.secret)
        caller = Caller(Role.AGENT, 0, 0, NODE, os.getpid())
        self.agent = AgentLink(place, lambda: caller, self._pass_on)
        self.socket = self.agent.ranks.begin(3, SIZE, self.secret)
        self.agent.start()
        wait_until(lambda: self.agent.ranks._server, "the agent")
        self.links: list[ControlClient] = []

    def _hear(self, node: str, news: FleetNews) -> None:
        match news:
            case RankNews() | SummedReports():
                self.channel.hear(node, news)
            case AgentDisconnected(reason, hung_up):
                self.channel.cut_off(node, reason, hung_up)

    def _pass_on(self, message: ToAgent) -> None:
        if isinstance(message, TellRanks | Alive):
            self.agent.ranks.pass_on(message)

    def close(self) -> None:
        """End both sides: a link that is left would call at a port that another test may get."""
        for link in self.links:
            link.leave(0, "")
        self.agent.ranks.end()
        self.fleet.close()
        self.agent.close()

    def launch(self, **changes: Any) -> Launch:
        return replace(Launch(Attempt(3, "abcd"), self.secret, self.socket), **changes)

    def link(
        self, rank: int, patience: float = 60.0, through: str | None = None, **changes: Any
    ) -> LinkedRank:
        """A rank's link; `through` a relay to its agent."""
        return LinkedRank(self, rank, patience, through, **changes)

    def expect(self, kind: type[News]) -> Any:
        """The next news, which must be of this kind."""
        news = self.news.get(timeout=scaled(20))
        assert isinstance(news, kind), news
        return news

    def refusals(self) -> list[str]:
        log = read_lines(self.run.supervisor_log(3))
        return [line["reason"] for line in log if line["event"] == "connection refused"]


class LinkedRank:
    """A rank's link in this process, and what it was told."""

    def __init__(
        self,
        supervisor: Supervisor,
        rank: int,
        patience: float,
        through: str | None,
        **changes: Any,
    ) -> None:
        self.progress = Progress()
        self.stops: queue.SimpleQueue[Stop] = queue.SimpleQueue()
        self.silences: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.standstills: queue.SimpleQueue[float] = queue.SimpleQueue()
        react = Reactions(
            self.stops.put, self.silences.put, self.standstills.put, patience, patience
        )
        launch = supervisor.launch(**changes)
        self.link = ControlClient(launch, supervisor.run, rank, self.progress, react)
        if through is not None:
            caller = caller_of(launch, rank)
            self.link._link._dial = lambda: door_of(launch).open(dial(through), caller)
        self.link.start()
        supervisor.links.append(self.link)


class Stranger:
    """A connection without manners."""

    def __init__(self, target: int | str) -> None:
        self.socket = dial(target)
        self.socket.settimeout(scaled(20))
        self.stream = self.socket.makefile("rb")

    def hear(self) -> Message:
        message: Message = _DECODE(self.stream.readline())
        return message

    def challenge(self) -> str:
        message = self.hear()
        assert isinstance(message, Challenge)
        return message.nonce

    def say(self, content: bytes | Message) -> None:
        self.socket.sendall(content if isinstance(content, bytes) else encode(content))

    def wait_until_all_is_sent(self) -> None:
        """Until the other side has all that was said: no reset can take it back."""
        wait_until(lambda: not self._unsent(), "all that was said to be with the other side")

    def _unsent(self) -> int:
        """Bytes that the other side's kernel has not acknowledged yet (tcp(7), SIOCOUTQ)."""
        count = array("i", [0])
        fcntl.ioctl(self.socket, termios.TIOCOUTQ, count)  # the same number as SIOCOUTQ
        return count[0]

    def is_hung_up_on(self) -> bool:
        try:
            return self.stream.read() == b""
        except ConnectionResetError:
            return True


def dial(target: int | str) -> socket.socket:
    """To a port of this machine, or a Unix socket."""
    if isinstance(target, str):
        return connect_here(target)
    return socket.create_connection((LOOPBACK, target))


class Relay:
    """Stands before a port or a Unix socket, for as long as it likes, and is one of the same
    kind."""

    def __init__(self, target: int | str) -> None:
        self._target = target
        self.name = f"relay-{new_nonce()}"
        local = isinstance(target, str)
        self._listener = listen_here(self.name) if local else socket.create_server((LOOPBACK, 0))
        self.place = self.name if local else self._listener.getsockname()[1]
        self.swallow = threading.Event()
        self._ends: list[socket.socket] = []

    def __enter__(self) -> Relay:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        for end in self._ends:
            with suppress(OSError):  # over already
                end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()
        self.swallow.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = dial(self._target)
                far.settimeout(None)
            except OSError:
                return
            self._ends += [near, far]
            for source, target, answers in ((near, far, False), (far, near, True)):
                args = (source, target, answers)
                threading.Thread(target=self._pass_on, args=args, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        try:
            while content := source.recv(65536):
                if not (answers and self.swallow.is_set()):
                    target.sendall(content)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            return
