"""An agent's side of the control channel: it relays between the ranks of its node and the
supervisor, and sums up their reports.

A rank's connection represents the whole path to the supervisor. So ranks are connected only while
the agent's own link is: when it breaks, so do theirs, and they send again what the supervisor has
not acknowledged. Nothing that could be lost is kept here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Collection, Sequence
from enum import Enum, auto

from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    FromRank,
    News,
    RankMessage,
    RankNews,
    Report,
    SummedReports,
    TellRanks,
    Usage,
    decode_from_rank,
)
from kempner.run.link.auth import Door, Secret, new_nonce, ranks_at
from kempner.run.link.messages import Alive, Caller, Message, MessageError, encode, shorten
from kempner.run.link.server import LinkServer
from kempner.run.link.wire import HungUpError, listen_here
from kempner.run.output.logs import logger

DRAINED_WITHIN = 1.0
"""Seconds to read the last messages of ranks that have ended."""


class LinkState(Enum):
    """The state of an agent's link to the supervisor."""

    UP = auto()
    CUT = auto()
    """There is no connection."""

    REFUSED = auto()
    """The supervisor's machine refuses connections: nothing listens there."""


class RankHub:
    """Listens for the ranks of one attempt after the other, at most `size` at once.

    `say` sends to the supervisor, from any thread; a message without a connection is lost. `here`:
    the supervisor is this process, so reports are passed on at once, not summed up."""

    def __init__(self, say: Callable[[Message], None], here: bool = False) -> None:
        self._say, self._here = say, here
        self._state = LinkState.UP if here else LinkState.CUT
        self.joined = False
        """Whether any rank of the attempt has connected."""
        self._pids: dict[int, int] = {}
        """The process ids of the connected ranks."""
        self._attempt, self._size, self._socket, self._door = (
            0,
            0,
            "",
            Door(Secret(""), ranks_at("")),
        )
        self._server: LinkServer[int, FromRank] | None = None
        self._mute: socket.socket | None = None
        self._early: list[TellRanks] = []
        self._reports: dict[int, Report] = {}
        self._usage: dict[int, Usage] = {}
        self._lock = threading.Lock()
        """Held for short; the server's thread takes it, too."""
        self._changing = threading.Lock()
        """Held while a server is opened or closed, which waits for its thread."""

    def begin(self, attempt: int, size: int, secret: Secret) -> str:
        """Listen for the ranks of an attempt; the name of the socket."""
        with self._changing:
            self._close(0.0)
            self._size, self._socket = size, f"kempner-{new_nonce()}"
            self._door = Door(secret, ranks_at(self._socket))
            self._attempt, self.joined = attempt, False
            self._open()
        with self._lock:
            early, self._early = self._early, []
        for message in early:
            self.pass_on(message)
        return self._socket

    def end(self) -> None:
        """After the ranks have ended: read their last messages, and stop listening."""
        with self._changing:
            self._close(DRAINED_WITHIN)
            self._socket = ""

    def follow(self, state: LinkState) -> None:
        """Make the ranks' links follow the state of the agent's own."""
        with self._changing:
            if state is self._state:
                return
            self._close(0.0)
            self._state = state
            self._open()

    def pass_on(self, message: TellRanks | Alive) -> None:
        """Pass a message of the supervisor on to the ranks; from any thread."""
        with self._lock:
            if isinstance(message, TellRanks) and message.attempt > self._attempt:
                self._early.append(message)
            elif self._server is None:
                return
            elif isinstance(message, Alive):
                self._server.tell(message)
            elif message.attempt == self._attempt:
                self._server.tell(message.message, message.rank, message.stands)

    def pids(self) -> Collection[int]:
        """The process ids of the connected ranks."""
        return set(self._pids.copy().values())

    def summary(self) -> Sequence[SummedReports]:
        """The ranks' reports since the last call."""
        with self._lock:
            reports, usage = self._reports, self._usage
            self._reports, self._usage = {}, {}
        if not (reports or usage):
            return ()
        whole = SummedReports(self._attempt, reports, usage)
        if _fits(whole):
            return (whole,)
        parts = [SummedReports(self._attempt, {rank: r}, {}) for rank, r in reports.items()]
        parts += [SummedReports(self._attempt, {}, {rank: u}) for rank, u in usage.items()]
        return list(filter(_fits, parts))

    def admit(self, caller: Caller) -> tuple[int, Sequence[Message]]:
        """Accept a rank of this attempt."""
        if caller.group != self._attempt:
            raise MessageError(f"it belongs to attempt {caller.group}")
        if caller.member >= self._size:
            raise MessageError(f"it claims to be rank {caller.member} of {self._size}")
        self.joined = True
        self._pids[caller.member] = caller.pid
        self._send(Connected(caller.member, caller.host, caller.pid))
        return caller.member, ()

    def hear(self, rank: int, message: FromRank) -> None:
        """Keep a rank's newest report and usage, and pass other messages on."""
        match message:
            case Report() if self._here:
                self._say(SummedReports(self._attempt, {rank: message}, {}))
            case Usage() if self._here:
                self._say(SummedReports(self._attempt, {}, {rank: message}))
            case Report():
                with self._lock:
                    self._reports[rank] = message
            case Usage():
                with self._lock:
                    self._usage[rank] = message
            case _:
                self._send(RankMessage(rank, message))

    def disconnected(self, rank: int, why: Exception) -> None:
        self._pids.pop(rank, None)
        self._send(Disconnected(rank, shorten(str(why)), isinstance(why, HungUpError)))

    def tick(self) -> None:
        """Send `Alive` if the supervisor is this process; else its own is passed on."""
        if self._here and self._server is not None:
            self._server.say_alive(Alive())

    def _send(self, news: News) -> None:
        """Send news after the reports that came before it."""
        for message in self.summary():
            self._say(message)
        self._say(RankNews(self._attempt, news))

    def _open(self) -> None:
        if not self._socket:
            return
        if self._state is LinkState.CUT:
            # Connections are not answered, as by a supervisor that cannot be reached.
            self._mute = listen_here(self._socket)
        elif self._state is LinkState.UP:
            server: LinkServer[int, FromRank] = LinkServer(
                [listen_here(self._socket)],
                self._door,
                self,
                decode_from_rank,
                self._size,
                "ranks",
                confirms=False,
            )
            server.start()
            with self._lock:
                self._server = server

    def _close(self, within: float) -> None:
        with self._lock:
            server, self._server = self._server, None
        if server is not None:
            server.close(within)
            self._pids.clear()
        if self._mute is not None:
            self._mute.close()
            self._mute = None


def _fits(message: Message) -> bool:
    try:
        encode(message)
    except MessageError as error:
        logger().warning("what ranks report is left out", reason=str(error))
        return False
    return True
