"""A rank's side of the control channel: one thread that keeps the connection to the rank's agent.

The agent takes calls only as long as it has a connection to the supervisor itself. So a broken or
refused connection to the agent means the same as one to the supervisor.

It sends the rank's progress once a second, and obeys the supervisor at once, even while the main
thread sits in a collective that will never end: collectives, files and sockets release the GIL.
Native code that holds the GIL stops this thread, too. The supervisor then sees a silent connection,
and ends the process from outside.
"""

from __future__ import annotations

import faulthandler
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum, auto
from math import inf

from kempner.run.control.heartbeat import Progress, ProgressWatchdog
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    DumpStacks,
    Event,
    FromSupervisor,
    Outcome,
    PeerLost,
    Report,
    Stop,
    Usage,
    decode_from_rank,
    decode_from_supervisor,
)
from kempner.run.link.auth import Door, ranks_at
from kempner.run.link.client import LinkClient, Outbox, SilenceClock
from kempner.run.link.messages import Caller, Post, Role, shorten
from kempner.run.link.wire import Connection, connect_here
from kempner.run.output.console import leave
from kempner.run.output.logs import logger
from kempner.run.process.collectives import flight_record
from kempner.run.process.exit_codes import LEFT_EARLY, ExitCode
from kempner.run.process.whereabouts import CodePlace
from kempner.run.record.events import ConnectionsStalled, LedgerEvent, StandsAt
from kempner.run.record.run_dir import RunDirectory


def caller_of(launch: Launch, rank: int) -> Caller:
    """How this process introduces itself as a rank."""
    return Caller(Role.RANK, launch.attempt.number, rank, socket.gethostname(), os.getpid())


PEER_LOST_GRACE = 1.0
"""Seconds that the main thread gets to leave by itself when a peer is gone."""


class Overdue(Enum):
    """What has taken too long; each is reported once."""

    SUPERVISOR = auto()
    """The supervisor has said nothing."""
    STEP = auto()
    """The rank makes no progress, and there is no supervisor to say why."""
    EXIT = auto()
    """The main thread has not left, though a peer is gone."""


class RankDeadlines:
    """The deadlines that a rank's link watches. `patience` and `grace` are those of `Reactions`."""

    def __init__(self, progress: Progress, patience: float, grace: float) -> None:
        self.supervisor = SilenceClock(patience)
        self.step = ProgressWatchdog(progress, patience, grace)
        self._forsaken = False
        self._exit_at: float | None = None

    def peer_lost(self) -> None:
        """Start the `PEER_LOST_GRACE` seconds in which the main thread must leave."""
        self._exit_at = time.monotonic() + PEER_LOST_GRACE

    def look(self) -> list[Overdue]:
        """What is overdue now and was not before."""
        found = []
        if self.supervisor.exceeds_limit():
            found.append(Overdue.SUPERVISOR)
        if self.step.too_long() and self.supervisor.noticed and not self._forsaken:
            self._forsaken = True
            found.append(Overdue.STEP)
        if self._exit_at is not None and time.monotonic() >= self._exit_at:
            self._exit_at = None
            found.append(Overdue.EXIT)
        return found

    def wake_at(self, until: float) -> float:
        """`until`, or the exit if that comes first; seconds of `time.monotonic`."""
        return until if self._exit_at is None else min(until, self._exit_at)


USAGE_BEAT = 10.0
"""Seconds between two measurements of the process's memory and files."""


class RankReports:
    """Knows when the next report is due. A report may get lost: the next one repeats it."""

    def __init__(self, progress: Progress, measure: Callable[[], Usage | None]) -> None:
        self._progress, self._measure = progress, measure
        self.next_at = self._usage_at = 0.0
        """When the next is due, in seconds of `time.monotonic`."""

    def place(self) -> CodePlace:
        """Where the program stands, if it is the user's own."""
        return self._progress.place()

    def hurry(self, usage: bool = False) -> None:
        """Make a report due now, and `usage` too if it is True."""
        self.next_at = 0.0
        if usage:
            self._usage_at = 0.0

    def due(self, beat: float, skip: bool = False) -> Iterator[Report | Usage]:
        """What is due, if anything; the next is `beat` seconds later. `skip` drops this one."""
        now = time.monotonic()
        if now < self.next_at:
            return
        self.next_at = now + beat
        if skip:
            return
        yield self._progress.report()
        if now >= self._usage_at:
            self._usage_at = now + USAGE_BEAT
            if (usage := self._measure()) is not None:
                yield usage


BEAT = 1.0
"""Seconds between two reports."""

LAST_WORDS = 3.0
"""Seconds that a rank waits, at its end, until the supervisor confirms its last messages; longer
than an attempt to connect takes."""

MOST_STALLED = 100
"""Most connections that a rank reports: the length of a message is limited."""

_LISTEN = 0.1
"""Seconds between two looks whether the supervisor has answered."""


@dataclass(frozen=True)
class Reactions:
    """What a rank does when the supervisor asks it to stop (`stop`), when the supervisor has been
    silent for `patience` seconds (`silence`), and when the rank then makes no progress
    (`standstill`). Called from the link's thread, and must not wait.

    A step may take `patience` seconds, another phase, such as the last save, `grace` seconds.
    `stalled` returns the local and remote address of each connection of this node that delivers
    nothing, `measure` the memory and files that this process uses, or None if unknown. `has_died`
    returns whether the supervisor is known to have died; it is called when connections are refused.
    """

    stop: Callable[[Stop], None]
    silence: Callable[[float], None]
    standstill: Callable[[float], None]
    patience: float
    grace: float
    stalled: Callable[[], list[tuple[str, str]]] = list
    measure: Callable[[], Usage | None] = lambda: None
    has_died: Callable[[], bool] = lambda: False


class ControlClient:
    """The connection between this rank and its supervisor. No method fails because it is down."""

    def __init__(
        self, launch: Launch, run: RunDirectory, rank: int, progress: Progress, react: Reactions
    ) -> None:
        self._launch, self._caller, self._react = launch, caller_of(launch, rank), react
        self._stacks = run.stacks(launch.attempt.number, rank)
        self._flight = run.flight(launch.attempt.number, rank)
        self._reports = RankReports(progress, react.measure)
        self._deadlines = RankDeadlines(progress, react.patience, react.grace)
        self._outbox = Outbox(decode_from_rank)
        self._link = LinkClient(
            self._dial, decode_from_supervisor, self, self._outbox, self._deadlines.supervisor
        )
        self._heard_before = 0
        self.peer_lost: PeerLost | None = None
        """The first peer that is known to be gone."""

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._link.start()

    def record(self, event: LedgerEvent) -> None:
        """Send a line for the ledger."""
        self._link.post(lambda number: Event(number, event.name, event.to_fields()))

    def leave(self, code: int, sentence: str) -> list[Event]:
        """Report how this process ends, wait until that is confirmed, and disconnect.

        Waits for at most `LAST_WORDS` seconds.

        Returns the ledger events that are lost unless the caller writes them: none while there is a
        connection to the supervisor.
        """
        self.say_how_it_ends(code, sentence)
        return self.close_link()

    def say_how_it_ends(self, code: int, sentence: str) -> None:
        """The first half of `leave`: the connection stays. Does not wait for a dead supervisor."""
        self._heard_before = self._deadlines.supervisor.times_heard
        self._reports.hurry()  # the last position goes before the outcome
        self._link.post(lambda number: Outcome(number, int(code), shorten(sentence)))
        end = time.monotonic() + LAST_WORDS
        while self._outbox.wait_until_heard(_LISTEN) and time.monotonic() < end:
            if self.supervisor_has_died():
                break

    def supervisor_has_died(self) -> bool:
        """Whether connections are refused because the supervisor is dead."""
        return self._deadlines.supervisor.refuses and self._react.has_died()

    def outlives_supervisor(self) -> bool:
        """Whether the supervisor does not confirm how this process ends; waits until that is
        sure."""
        supervisor = self._deadlines.supervisor
        while supervisor.times_heard == self._heard_before:
            if supervisor.noticed or self.supervisor_has_died():
                return True
            time.sleep(_LISTEN)
        return False

    def take_back(self) -> list[Event]:
        """Remove and return the ledger events that were not sent for want of a connection: the
        caller writes them."""
        if self._link.alone_since is None:
            return []
        events = _events(self._outbox.wait_until_heard(0.0))
        self._outbox.drop(events)
        return events

    def close_link(self) -> list[Event]:
        """The second half of `leave`."""
        unheard = self._outbox.wait_until_heard(0.0)
        held = self._link.alone_since is None  # asked first: the thread hangs up once it is over
        self._link.close()
        return [] if held else _events(unheard)

    def opened(self) -> None:
        """After connecting, report at once where this rank is."""
        self._reports.hurry()

    def due(self, behind: bool) -> Iterator[Report | Usage]:

        return self._reports.due(BEAT, skip=behind)

    def next_at(self, connected: bool) -> float:
        """When the next report is due, or this process has to exit."""
        return self._deadlines.wake_at(self._reports.next_at if connected else inf)

    def look(self, connected: bool) -> None:

        for overdue in self._deadlines.look():
            match overdue:
                case Overdue.SUPERVISOR:
                    self._react.silence(self._deadlines.supervisor.seconds)
                case Overdue.STEP:
                    self._react.standstill(self._deadlines.step.seconds)
                case Overdue.EXIT:
                    # On another thread: this one has to deliver the outcome.
                    threading.Thread(target=self._give_up, name="exit", daemon=True).start()

    def hear(self, message: FromSupervisor) -> None:

        match message:
            case Stop():
                self._react.stop(message)
            case PeerLost() if self.peer_lost is None:
                self.peer_lost = message
                self._reports.hurry(usage=True)  # if memory ran out, it shows on this node
                self._deadlines.peer_lost()
            case DumpStacks():
                self._dump_stacks()
                self._tell_place()
                self._tell_of_stalled()
                self._dump_flight()

    def _dump_stacks(self) -> None:
        try:
            with open(self._stacks, "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger().warning("cannot write the stacks", reason=error.strerror)

    def _dump_flight(self) -> None:
        if not (record := flight_record()):
            return
        try:
            self._flight.write_bytes(record)
        except OSError as error:
            logger().warning("cannot write the flight record", reason=error.strerror)

    def _tell_place(self) -> None:
        if (place := self._reports.place()) != CodePlace():
            self.record(StandsAt(place.line, place.collective))

    def _tell_of_stalled(self) -> None:
        if ends := self._react.stalled():
            self.record(ConnectionsStalled(tuple(ends[:MOST_STALLED])))

    def _dial(self) -> Connection:
        door = Door(self._launch.secret, ranks_at(self._launch.socket))
        return door.open(connect_here(self._launch.socket), self._caller)

    def _give_up(self) -> None:
        """End the process, although the main thread may be waiting for that peer."""
        assert self.peer_lost is not None  # only `peer_lost` sets the deadline
        sentence = f"exited, because rank {self.peer_lost.rank} {self.peer_lost.words}"
        # The run was stopped before there was anything to lose: this rank stops for that reason.
        stopped = self.peer_lost.words.startswith(LEFT_EARLY)
        code = ExitCode.STOPPED if stopped else ExitCode.PEERS_LOST
        self.leave(code, sentence)
        logger().error(sentence)
        leave(code)


def _events(messages: list[Post]) -> list[Event]:
    return [message for message in messages if isinstance(message, Event)]
