"""Both ends of the control channel in one process: a supervisor, its ranks, and strangers."""

from __future__ import annotations

import fcntl
import queue
import socket
import termios
import threading
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness import wait_until
from patience import scaled

from kempner.run.control.client import ControlClient, Reactions
from kempner.run.control.heartbeat import Progress
from kempner.run.control.launch_env import Control, Launch
from kempner.run.control.protocol import (
    Challenge,
    FromRank,
    FromSupervisor,
    Secret,
    Stop,
    decode_from_supervisor,
    encode,
)
from kempner.run.output import logs
from kempner.run.record.attempts import Attempt
from kempner.run.record.ledger import read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.control.events import News
from kempner.supervisor.control.file_transport import FileTransport
from kempner.supervisor.control.peers import Membership, listen
from kempner.supervisor.control.server import ControlServer

SIZE = 4
LOOPBACK = "127.0.0.1"


class Supervisor:
    """A channel of attempt 3 over four ranks, and what it hands on."""

    def __init__(self, folder: Path) -> None:
        self.run = RunDirectory(folder / "run")
        self.run.attempt(3).mkdir(parents=True)
        logs.configure()
        logs.open_log(self.run.supervisor_log(3))
        self.secret = Secret.new()
        self.news: queue.SimpleQueue[News] = queue.SimpleQueue()
        members = Membership(self.secret, attempt=3, size=SIZE)
        files = FileTransport(self.run, 3, SIZE)
        self.channel = ControlServer(listen([LOOPBACK], None), members, files, self.news.put)
        self.channel.start()
        self.links: list[ControlClient] = []

    def close(self) -> None:
        """End both sides; nobody is left to call at a port that somebody else may get."""
        for link in self.links:
            link.leave(0, "")
        self.channel.close()

    def launch(self, **changes: Any) -> Launch:
        control = Control((LOOPBACK,), self.channel.port, self.secret)
        return Launch(Attempt(3, "abcd"), replace(control, **changes))

    def link(self, rank: int, patience: float = 60.0, **changes: Any) -> LinkedRank:
        return LinkedRank(self, rank, patience, **changes)

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

    def __init__(self, supervisor: Supervisor, rank: int, patience: float, **changes: Any) -> None:
        self.progress = Progress()
        self.stops: queue.SimpleQueue[Stop] = queue.SimpleQueue()
        self.silences: queue.SimpleQueue[float] = queue.SimpleQueue()
        self.standstills: queue.SimpleQueue[float] = queue.SimpleQueue()
        react = Reactions(
            self.stops.put, self.silences.put, self.standstills.put, patience, patience
        )
        launch = supervisor.launch(**changes)
        self.link = ControlClient(launch, supervisor.run, rank, self.progress, react)
        self.link.start()
        supervisor.links.append(self.link)


class Stranger:
    """A connection without manners."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection((LOOPBACK, port), timeout=scaled(20))
        self.stream = self.socket.makefile("rb")

    def hear(self) -> FromSupervisor:
        return decode_from_supervisor(self.stream.readline())

    def challenge(self) -> str:
        message = self.hear()
        assert isinstance(message, Challenge)
        return message.nonce

    def say(self, content: bytes | FromRank) -> None:
        self.socket.sendall(content if isinstance(content, bytes) else encode(content))

    def wait_until_all_is_sent(self) -> None:
        """Until the other side's kernel has all that was said: no reset can take it back."""
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


class Relay:
    """Stands between a rank and its supervisor, for as long as it likes."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._listener = socket.create_server((LOOPBACK, 0))
        self.port = self._listener.getsockname()[1]
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
            end.shutdown(socket.SHUT_RDWR)
        self._ends.clear()
        self.swallow.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
                far = socket.create_connection((LOOPBACK, self._target))
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
        except OSError:
            return
