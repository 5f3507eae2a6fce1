"""An agent's side of the control channel: it listens to the ranks of its node, and sums up for the
supervisor what they say.

A rank's connection stands for the whole way to the supervisor. So the ranks are connected only as
long as the agent is: when its own link breaks, so do theirs, and they say everything again that the
supervisor has not confirmed. Nothing is kept here that could be lost.
"""

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

LAST_WORDS = 1.0
"""Seconds for which is listened to what still comes from ranks that have ended."""


class LinkState(Enum):
    """What an agent knows of its way to the supervisor."""

    UP = auto()
    CUT = auto()
    """There is no connection now."""
    REFUSED = auto()
    """The supervisor's machine answers, and refuses one: nothing listens there."""


class RankHub:
    """Listens to the ranks of one attempt after the other, at most `size` at once.

    `say` sends to the supervisor, from any thread, and loses what is said without a connection.
    `here` says that the supervisor is this process: then what ranks say is not summed up.
    """

    def __init__(self, say: Callable[[Message], None], here: bool = False) -> None:
        self._say, self._here = say, here
        self._state = LinkState.UP if here else LinkState.CUT
        self.joined = False
        """Whether any rank of the attempt has connected."""
        self._pids: dict[int, int] = {}
        """The processes of those that are connected."""
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
        """For a moment; the server's thread takes it, too."""
        self._changing = threading.Lock()
        """While a server is opened or closed, which waits for its thread."""

    def begin(self, attempt: int, size: int, secret: Secret) -> str:
        """Listen to the ranks of an attempt; the name of the socket."""
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
        """Its ranks have ended: take in what still comes of them."""
        with self._changing:
            self._close(LAST_WORDS)
            self._socket = ""

    def follow(self, state: LinkState) -> None:
        """The state of the agent's own link; what a rank's link is from now on."""
        with self._changing:
            if state is self._state:
                return
            self._close(0.0)
            self._state = state
            self._open()

    def pass_on(self, message: TellRanks | Alive) -> None:
        """Tell ranks what the supervisor says; from any thread."""
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
        """The processes of the ranks that can be told."""
        return set(self._pids.copy().values())

    def summary(self) -> Sequence[SummedReports]:
        """What the ranks have reported since the last time."""
        with self._lock:
            reports, usage = self._reports, self._usage
            self._reports, self._usage = {}, {}
        if not (reports or usage):
            return ()
        whole = SummedReports(self._attempt, reports, usage)
        if _fits(whole):
            return (whole,)
        parts = [SummedReports(self._attempt, {rank: said}, {}) for rank, said in reports.items()]
        parts += [SummedReports(self._attempt, {}, {rank: said}) for rank, said in usage.items()]
        return list(filter(_fits, parts))

    def admit(self, caller: Caller) -> tuple[int, Sequence[Message]]:
        """A rank of this attempt has connected."""
        if caller.group != self._attempt:
            raise MessageError(f"it belongs to attempt {caller.group}")
        if caller.member >= self._size:
            raise MessageError(f"it claims to be rank {caller.member} of {self._size}")
        self.joined = True
        self._pids[caller.member] = caller.pid
        self._tell_of(Connected(caller.member, caller.host, caller.pid))
        return caller.member, ()

    def hear(self, rank: int, message: FromRank) -> None:
        """Keep its newest report and usage, and pass the rest on."""
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
                self._tell_of(RankMessage(rank, message))

    def disconnected(self, rank: int, why: Exception) -> None:
        """A rank's connection is over."""
        self._pids.pop(rank, None)
        self._tell_of(Disconnected(rank, shorten(str(why)), isinstance(why, HungUpError)))

    def tick(self) -> None:
        """The supervisor is there, if it is this process."""
        if self._here and self._server is not None:
            self._server.say_alive(Alive())

    def _tell_of(self, news: News) -> None:
        """Say it after what was reported before."""
        for message in self.summary():
            self._say(message)
        self._say(RankNews(self._attempt, news))

    def _open(self) -> None:
        if not self._socket:
            return
        if self._state is LinkState.CUT:
            # A call is not answered, as by a supervisor that cannot be reached.
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
