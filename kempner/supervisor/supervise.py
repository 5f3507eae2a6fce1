"""The daemon: starts an attempt, follows it, passes stop requests on, and tells how it ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from itertools import pairwise
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import TypeAlias

from kempner.cluster.limits import raise_open_file_limit
from kempner.config.sections import SuperviseSection
from kempner.run.attempts import Attempt, begin_attempt
from kempner.run.exit_codes import ExitCode
from kempner.run.launch import Control, Launch
from kempner.run.layout import RunDirectory
from kempner.run.ledger import Ledger
from kempner.run.logs import logger, open_log
from kempner.run.messages import Event, Outcome, PeerLost, Secret, Stop, shorten
from kempner.run.signals import Received, SignalInbox
from kempner.supervisor.admission import Membership, listen
from kempner.supervisor.channel import Channel
from kempner.supervisor.file_channel import FileChannel
from kempner.supervisor.launcher import Launcher
from kempner.supervisor.news import Heard, Joined, News, Parted
from kempner.supervisor.policy import Decision, RankExit, decide, describe, failed
from kempner.supervisor.roster import Roster

LOOK = 0.5
"""Seconds between looks at the clock; whatever happens ends the wait at once."""

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""

RECONNECT = 3.0
"""Seconds within which a rank whose connection broke off has to be back, or it is gone. One that
lives tries again after a tenth of a second."""

EXIT_GRACE = 5.0
"""Seconds after the last word of the last rank that its process may take to be gone."""

Happening: TypeAlias = Received | RankExit | News


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    arguments: Sequence[str],
    size: int,
    section: SuperviseSection,
    signals: SignalInbox,
) -> ExitCode:
    """Run one attempt to its end; returns the exit code of the run."""
    happenings: SimpleQueue[Happening] = SimpleQueue()
    signals.react_with(happenings.put)  # from here on a stop is passed on to the ranks
    raise_open_file_limit()
    listener = listen(launcher.address, section.ports)
    attempt = begin_attempt(run)
    open_log(run.supervisor_log(attempt.number), attempt=attempt.number)
    ledger = Ledger(run.ledger)
    ledger.record("attempt_started", attempt=attempt.number, ranks=size)
    secret = Secret.new()
    channel = Channel(
        listener,
        Membership(secret, attempt.number, size),
        FileChannel(run, attempt.number, size),
        happenings.put,
    )
    channel.start()
    watch = Watch(attempt, size, section, launcher, channel, ledger)
    roster = Roster(run.ranks(attempt.number))
    try:
        control = Control(launcher.address, channel.port, secret)
        launcher.start(Launch(attempt, os.getpid(), control), arguments, happenings.put)
        while not watch.over():
            watch.take_in(happenings)
            if insists(watch.signals):
                return _leave_at_once(ledger, attempt)
            watch.enforce()
            roster.update(channel.sightings())
    finally:
        launcher.kill()
        channel.close()
    watch.take_in(happenings, wait=False)
    roster.update(channel.sightings(), now=True)
    decision = decide(watch.ends, stop_requested=watch.stop_asked_at is not None)
    _close(ledger, attempt, decision, watch.ends)
    return decision.code


def insists(received: Sequence[Received]) -> bool:
    """Whether the user pressed Ctrl-C twice within `INSIST_WITHIN` seconds."""
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


class Watch:
    """What the supervisor knows of the attempt under way, and does about it at once.

    Times are `time.monotonic` seconds.
    """

    def __init__(
        self,
        attempt: Attempt,
        size: int,
        section: SuperviseSection,
        launcher: Launcher,
        channel: Channel,
        ledger: Ledger,
    ) -> None:
        self._attempt, self._size, self._section = attempt, size, section
        self._launcher, self._channel, self._ledger = launcher, channel, ledger
        self._ends: dict[int, tuple[float, RankExit]] = {}
        self.signals: list[Received] = []
        self.stop_asked_at: float | None = None
        self._failed_at: float | None = None
        self._ended_at = 0.0
        self._parted: dict[int, float] = {}

    @property
    def ends(self) -> list[RankExit]:
        """How ranks ended, in the order of the first sign of it."""
        return [end for _, end in sorted(self._ends.values(), key=itemgetter(0))]

    def over(self) -> bool:
        """Whether nothing is left to follow."""
        if len(self._ends) < self._size:
            return not self._launcher.alive()
        return not self._launcher.alive() or time.monotonic() - self._ended_at > EXIT_GRACE

    def take_in(self, happenings: SimpleQueue[Happening], *, wait: bool = True) -> None:
        """Act on all that has happened; `wait` until something has, or `LOOK` seconds are over."""
        try:
            self._act_on(happenings.get(wait, LOOK))
            while True:
                self._act_on(happenings.get_nowait())
        except Empty:
            return

    def enforce(self) -> None:
        """End what outstays its time: a broken connection, a stop, the failure of another rank."""
        now, section = time.monotonic(), self._section
        for rank, at in list(self._parted.items()):
            if now - at > RECONNECT:
                self._note_end(RankExit(rank, None))
        overdue = self.stop_asked_at is not None and now - self.stop_asked_at > section.stop_grace
        orphaned = self._failed_at is not None and now - self._failed_at > section.crash_grace
        if overdue or orphaned:
            self._launcher.kill()

    def _act_on(self, happening: Happening) -> None:
        match happening:
            case Received():
                self._pass_on(happening)
            case RankExit():
                self._note_end(happening)
            case Joined():
                logger().info("joined", rank=happening.rank, host=happening.host, pid=happening.pid)
                self._parted.pop(happening.rank, None)
            case Parted():
                logger().info("parted", rank=happening.rank, reason=happening.reason)
                if happening.rank not in self._ends:
                    self._parted[happening.rank] = time.monotonic()
            case Heard(_, Event() as event):
                self._ledger.record(event.name, **{"attempt": self._attempt.number, **event.fields})
            case Heard(rank, Outcome() as outcome):
                self._note_end(RankExit(rank, outcome.code, sentence=outcome.sentence))

    def _pass_on(self, received: Received) -> None:
        self.signals.append(received)
        name = received.signal.name
        if self.stop_asked_at is None:
            logger().warning(f"{name}: stopping after this step, with a checkpoint")
            self._ledger.record("stop_requested", attempt=self._attempt.number, reason=name)
        self._ask_to_stop(name)

    def _ask_to_stop(self, reason: str) -> None:
        if self.stop_asked_at is None:
            self.stop_asked_at = time.monotonic()
            self._channel.tell(Stop(reason, self._section.stop_grace))
        self._launcher.ask_to_stop()

    def _note_end(self, end: RankExit) -> None:
        if end.rank in self._ends:
            return  # its own words came first and say more than its exit status
        logger().info("ended", rank=end.rank, how=describe(end))
        self._ended_at = time.monotonic()
        self._ends[end.rank] = (self._parted.pop(end.rank, self._ended_at), end)
        if failed(end) and self._failed_at is None:
            self._failed_at = self._ended_at
            self._channel.tell(PeerLost(end.rank, shorten(describe(end))))
        if end.status == ExitCode.STOPPED and self.stop_asked_at is None:
            # A rank that was signalled alone, before it knew the others: they would wait for it.
            self._ask_to_stop(f"rank {end.rank} was asked to stop")


def _leave_at_once(ledger: Ledger, attempt: Attempt) -> ExitCode:
    reason = "left at once on the second Ctrl-C; the last commit is intact"
    _close(ledger, attempt, Decision(ExitCode.INTERRUPTED, reason), [])
    return ExitCode.INTERRUPTED


def _close(ledger: Ledger, attempt: Attempt, decision: Decision, exits: Sequence[RankExit]) -> None:
    ledger.record(
        "attempt_ended",
        attempt=attempt.number,
        code=int(decision.code),
        reason=decision.reason,
        culprit=decision.culprit,
        exits={str(e.rank): e.status for e in exits},
    )
    if decision.code is not ExitCode.COMPLETED:
        logger().warning(decision.reason)
