"""A rank's side of the control channel: one thread that keeps the connection.

It sends the rank's progress once a second, and acts at once on what the supervisor says, even while
the main thread sits in a collective that will never end: collectives, files and sockets release
Python's lock. Native code that holds the lock stops this thread, too, and nothing can then be done
from inside the process; the supervisor sees a connection that stays up and says nothing, and ends
the process from outside.

Measures how long the other side has been silent, on this process's own clock.

When a rank has waited long enough: for its supervisor, for the others, for a lost peer's end.

The outbox: messages that must not be lost, kept until the supervisor confirms them.

What a rank tells its supervisor by itself: its progress, and now and then what it uses.

The control channel where no connection is possible: two files in the run's directory.
"""

from __future__ import annotations

import faulthandler
import os
import selectors
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial
from typing import TypeAlias

from kempner.run.control.handshake import introduce, open_wire
from kempner.run.control.heartbeat import Progress, ProgressWatchdog
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    DumpStacks,
    Event,
    FromSupervisor,
    MessageError,
    Noted,
    Outcome,
    PeerLost,
    Report,
    Stop,
    Usage,
    decode_from_rank,
    decode_from_supervisor,
    encode,
    shorten,
)
from kempner.run.control.transport import Connection, MessageFile
from kempner.run.output.console import leave
from kempner.run.output.logs import logger
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.stop_reason import LEFT_EARLY
from kempner.run.process.whereabouts import CodePlace
from kempner.run.record.events import ConnectionsStalled, LedgerEvent, StandsAt
from kempner.run.record.run_dir import RunDirectory


class SupervisorTimeout:
    """Counts the seconds since something was last heard, but for those spent suspended."""

    def __init__(self, limit: float) -> None:
        self._limit, self._clock = limit, AwakeClock()
        self._heard_at = 0.0
        self.noticed = False
        self.times_broken = 0
        self.refuses = False
        """Whether the port refused the last connection, though the machine answered."""

    @property
    def seconds(self) -> float:
        """Since something was last heard."""
        return self._clock.now() - self._heard_at

    def broken(self) -> None:
        """Note that the supervisor was heard."""
        self._heard_at, self.noticed, self.refuses = self._clock.now(), False, False
        self.times_broken += 1

    def exceeds_limit(self) -> bool:
        """Look at the clock: whether the limit is passed, told once for each silence."""
        if self.noticed or self.seconds < self._limit:
            return False
        self.noticed = True
        return True


PEER_LOST_GRACE = 1.0
"""Seconds that the main thread gets to leave by itself when a peer is gone."""


class Overdue(Enum):
    """What has taken too long; each is told once."""

    SUPERVISOR = auto()
    """The supervisor has said nothing."""
    STEP = auto()
    """Nothing moves, and there is no supervisor to say why."""
    EXIT = auto()
    """The main thread has not left, though a peer is gone."""


class RankDeadlines:
    """The clocks that a rank's link looks at. `patience` and `grace` are those of `Reactions`."""

    def __init__(self, progress: Progress, patience: float, grace: float) -> None:
        self.supervisor = SupervisorTimeout(patience)
        self.step = ProgressWatchdog(progress, patience, grace)
        self._forsaken = False
        self._exit_at: float | None = None

    def peer_lost(self) -> None:
        """From now on the main thread has `PEER_LOST_GRACE` seconds to leave."""
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


Post: TypeAlias = Event | Outcome


class Outbox:
    """Numbered messages, oldest first, that any thread adds to and one thread sends."""

    def __init__(self) -> None:
        self._unheard: deque[Post] = deque()
        self._added = 0
        self._changed = threading.Condition()

    def add(self, make: Callable[[int], Post]) -> None:
        """Add what `make` returns for its number.

        One that the other side would refuse, too long, say, is left out with a warning: it would
        cost the connection, again and again. Raises `TypeError` if a field is no JSON value.
        """
        with self._changed:
            message = make(self._added + 1)
            try:
                decode_from_rank(encode(message))
            except MessageError as error:
                logger().warning("ledger event dropped", reason=str(error))
                return
            self._added += 1
            self._unheard.append(message)

    def after(self, number: int) -> list[Post]:
        """The messages with greater numbers that have not been heard."""
        with self._changed:
            return [message for message in self._unheard if message.number > number]

    def heard(self, number: int) -> None:
        """The supervisor has everything up to this number."""
        with self._changed:
            while self._unheard and self._unheard[0].number <= number:
                self._unheard.popleft()
            self._changed.notify_all()

    def drop(self, events: Iterable[Post]) -> None:
        """Forget the lines for the ledger among these: the caller writes them."""
        gone = {message.number for message in events if isinstance(message, Event)}
        with self._changed:
            self._unheard = deque(m for m in self._unheard if m.number not in gone)

    def wait_until_heard(self, seconds: float) -> list[Post]:
        """Wait, at most so long, until all is heard; returns what is not."""
        with self._changed:
            self._changed.wait_for(lambda: not self._unheard, seconds)
            return list(self._unheard)


USAGE_BEAT = 10.0
"""Seconds between two measurements of what the process uses of its node."""


class RankReports:
    """Knows when the next report is due; each can be lost, for the next one says it again."""

    def __init__(self, progress: Progress, measure: Callable[[], Usage | None]) -> None:
        self._progress, self._measure = progress, measure
        self.next_at = self._usage_at = 0.0
        """When the next is due, in seconds of `time.monotonic`."""

    def place(self) -> CodePlace:
        """Where the program stands, if it is the user's own."""
        return self._progress.place()

    def hurry(self, usage: bool = False) -> None:
        """Have a report be due now, with what the process uses if `usage` is asked for."""
        self.next_at = 0.0
        if usage:
            self._usage_at = 0.0

    def due(self, beat: float, skip: bool = False) -> Iterator[Report | Usage]:
        """What is due, if anything; the next is `beat` seconds later. With `skip` only that."""
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


FILE_BEAT = 5.0
"""Seconds between two reports by file: a file system shared by thousands feels each of them."""


class FileExchange:
    """A rank's side: appends to a file of its own, and reads the supervisor's."""

    def __init__(self, launch: Launch, run: RunDirectory, rank: int) -> None:
        self._launch, self._rank = launch, rank
        number = launch.attempt.number
        self._own = MessageFile(run.messages(number, rank))
        self._theirs = MessageFile(run.messages(number, None))
        self._introduced = False

    def interrupt(self) -> None:
        """There is a connection again: the next exchange by file begins with an introduction."""
        self._introduced = False

    def exchange(
        self, reports: RankReports, outbox: Outbox, answered: bool
    ) -> Iterator[FromSupervisor]:
        """Write what there is to say, and read what came; both sides do so once in a while.

        What is written counts as heard as long as the supervisor has `answered` lately. Raises
        `OSError`, and `MessageError` for what is no message.
        """
        if not self._introduced:
            self._own.append(introduce(self._launch, self._rank, challenge=""))
            self._introduced = True
            reports.hurry()
        for report in reports.due(FILE_BEAT):
            self._own.append(report)
        for message in outbox.after(0) if answered else []:
            self._own.append(message)
            outbox.heard(message.number)
        for line in self._theirs.news():
            yield decode_from_supervisor(line)


BEAT = 1.0
"""Seconds between two reports."""

RETRY = (0.1, 2.0)
"""Seconds until the second try to connect, and the most between two tries."""

ALONE = 5.0
"""Seconds without a connection after which files are used instead: long before the supervisor takes
a silent rank for lost."""

LAST_WORDS = 3.0
"""Seconds that a rank waits, at its end, for its last words to be heard; longer than a try to
connect takes."""

STALLED_TOLD = 100
"""Connections that a rank tells of; a message has its limits."""

_LISTEN = 0.1
"""Seconds between two looks whether the supervisor has answered."""


@dataclass(frozen=True)
class Reactions:
    """What a rank does when it is told to stop, after `patience` seconds of silence, and when it
    then makes no progress, with no supervisor to say why. Called from the link's thread, and must
    not wait.

    `patience` seconds are given to a step, `grace` seconds to what is none, such as the last save.
    `stalled` tells the near and far address of each connection of this node that delivers nothing,
    `measure` what this process uses of its node, or None if that cannot be seen. `has_died` is
    whether the supervisor is known to have died; it is asked when the supervisor's port refuses
    connections.
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
    """The line between this rank and its supervisor. No method fails because the line is down."""

    def __init__(
        self, launch: Launch, run: RunDirectory, rank: int, progress: Progress, react: Reactions
    ) -> None:
        self._open, self._react = partial(open_wire, launch, rank), react
        self._stacks = run.stacks(launch.attempt.number, rank)
        self._reports, self._outbox = RankReports(progress, react.measure), Outbox()
        self._files = FileExchange(launch, run, rank)
        self._deadlines = RankDeadlines(progress, react.patience, react.grace)
        self._heard_before = 0
        self._over = False
        self._alone_since: float | None = time.monotonic()
        """Since when there is no connection; None while there is one."""
        self._alarm = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self.peer_lost: PeerLost | None = None
        """The first peer that is known to be gone."""

    def start(self) -> None:
        """Begin to connect, in the background."""
        threading.Thread(target=self._keep, name="link", daemon=True).start()

    def record(self, event: LedgerEvent) -> None:
        """Send a line for the ledger."""
        self._post(lambda number: Event(number, event.name, event.to_fields()))

    def leave(self, code: int, sentence: str) -> list[Event]:
        """Say how this process ends, wait until it is heard, and fall silent.

        Waits for at most `LAST_WORDS` seconds.

        Returns the lines for the ledger that are lost unless the caller writes them: those on the
        way to a supervisor that still holds the connection are not.
        """
        self.say_how_it_ends(code, sentence)
        return self.close_link()

    def say_how_it_ends(self, code: int, sentence: str) -> None:
        """The first half of `leave`: the line stays up. Nothing waits for one that has died."""
        self._heard_before = self._deadlines.supervisor.times_broken
        self._reports.hurry()  # where it ended, before its last words
        self._post(lambda number: Outcome(number, int(code), shorten(sentence)))
        end = time.monotonic() + LAST_WORDS
        while self._outbox.wait_until_heard(_LISTEN) and time.monotonic() < end:
            if self.supervisor_has_died():
                break

    def supervisor_has_died(self) -> bool:
        """Whether the supervisor's port refuses connections because the supervisor is dead."""
        return self._deadlines.supervisor.refuses and self._react.has_died()

    def outlives_supervisor(self) -> bool:
        """Whether nothing answers to how this process ends; waits until that is sure."""
        supervisor = self._deadlines.supervisor
        while supervisor.times_broken == self._heard_before:
            if supervisor.noticed or self.supervisor_has_died():
                return True
            time.sleep(_LISTEN)
        return False

    def take_back(self) -> list[Event]:
        """The lines for the ledger that could not be sent, for want of a connection: the caller
        writes them, and they are not sent any more."""
        if self._alone_since is None:
            return []
        unheard = self._outbox.wait_until_heard(0.0)
        self._outbox.drop(unheard)
        return [message for message in unheard if isinstance(message, Event)]

    def close_link(self) -> list[Event]:
        """The second half of `leave`."""
        unheard = self._outbox.wait_until_heard(0.0)
        held = self._alone_since is None  # asked first: the thread hangs up once it is over
        self._over = True
        os.eventfd_write(self._alarm, 1)
        return [m for m in unheard if isinstance(m, Event) and not held]

    def _post(self, make: Callable[[int], Post]) -> None:
        self._outbox.add(make)
        os.eventfd_write(self._alarm, 1)

    def _keep(self) -> None:
        """Connect, talk until the line breaks, and again: the life of the thread."""
        pause, longest = RETRY
        while not self._over:
            try:
                wire = self._open()
            except (OSError, MessageError) as error:
                refused = isinstance(error, ConnectionRefusedError)
                self._deadlines.supervisor.refuses = refused
                logger().debug("cannot connect to the supervisor", reason=str(error))
                self._wait_alone(pause)
                pause = min(2 * pause, longest)
                continue
            pause, _ = RETRY
            self._alone_since = None
            self._files.interrupt()
            self._talk(wire)
            self._alone_since = time.monotonic()
            self._wait_alone(pause)

    def _talk(self, wire: Connection) -> None:
        """Exchange messages until the connection breaks."""
        self._deadlines.supervisor.broken()  # it has just proved who it is
        self._reports.hurry()
        sent = 0  # what was on its way and never noted goes out again
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            selector.register(wire, selectors.EVENT_READ)
            try:
                while not self._over:
                    for line in wire.lines():
                        self._obey(decode_from_supervisor(line))
                    sent = self._speak(wire, sent)
                    self._look_at_clocks()
                    writing = selectors.EVENT_WRITE if wire.sending else 0
                    selector.modify(wire, selectors.EVENT_READ | writing)
                    self._wait_for_work(selector, self._reports.next_at)
            except (OSError, MessageError) as error:
                logger().info("lost the connection to the supervisor", reason=str(error))
            finally:
                wire.close()

    def _speak(self, wire: Connection, sent: int) -> int:
        """Say what there is to say; the number of the last message that was `sent` by then."""
        wire.flush()
        # A reader that is behind gets only what must not be lost.
        for report in self._reports.due(BEAT, skip=wire.sending):
            wire.send(report)
        for message in self._outbox.after(sent):
            wire.send(message)
            sent = message.number
        return sent

    def _wait_alone(self, seconds: float) -> None:
        """Wait until it is time to try again; talk by file if that takes long."""
        with selectors.DefaultSelector() as selector:
            selector.register(self._alarm, selectors.EVENT_READ)
            self._wait_for_work(selector, time.monotonic() + seconds)
        self._look_at_clocks()
        if self._alone_since is not None and time.monotonic() - self._alone_since >= ALONE:
            try:
                answered = not self._deadlines.supervisor.noticed
                for message in self._files.exchange(self._reports, self._outbox, answered):
                    self._obey(message)
            except (OSError, MessageError) as error:
                logger().debug("cannot exchange files with the supervisor", reason=str(error))

    def _obey(self, message: FromSupervisor) -> None:
        self._deadlines.supervisor.broken()
        match message:
            case Noted():
                self._outbox.heard(message.number)
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

    def _dump_stacks(self) -> None:
        try:
            with open(self._stacks, "a", encoding="utf-8") as file:
                faulthandler.dump_traceback(file, all_threads=True)
        except OSError as error:
            logger().warning("cannot write the stacks", reason=error.strerror)

    def _tell_place(self) -> None:
        if (place := self._reports.place()) != CodePlace():
            self.record(StandsAt(place.line, place.collective))

    def _tell_of_stalled(self) -> None:
        if ends := self._react.stalled():
            self.record(ConnectionsStalled(tuple(ends[:STALLED_TOLD])))

    def _look_at_clocks(self) -> None:
        for overdue in self._deadlines.look():
            match overdue:
                case Overdue.SUPERVISOR:
                    self._react.silence(self._deadlines.supervisor.seconds)
                case Overdue.STEP:
                    self._react.standstill(self._deadlines.step.seconds)
                case Overdue.EXIT:
                    # On a thread of its own: this one has to deliver the last words.
                    threading.Thread(target=self._give_up, name="exit", daemon=True).start()

    def _give_up(self) -> None:
        """End the process, although the main thread may wait for that peer for ever."""
        assert self.peer_lost is not None  # or no time would have been set
        sentence = f"exited, because rank {self.peer_lost.rank} {self.peer_lost.words}"
        # The run was stopped before there was anything to lose: this rank stops for that reason.
        stopped = self.peer_lost.words.startswith(LEFT_EARLY)
        code = ExitCode.STOPPED if stopped else ExitCode.PEERS_LOST
        self.leave(code, sentence)
        logger().error(sentence)
        leave(code)

    def _wait_for_work(self, selector: selectors.BaseSelector, until: float) -> None:
        """Wait until something happens, or until it is time for something."""
        until = self._deadlines.wake_at(until)
        selector.select(max(0.0, until - time.monotonic()))
        with suppress(BlockingIOError):
            os.eventfd_read(self._alarm)
