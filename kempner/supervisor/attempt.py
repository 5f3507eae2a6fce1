"""What the supervisor knows of the attempt under way, and does about it at once.

`policy.attempt_state` says what states it goes through, and `monitors` judge how it fares; here is
what is done about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf
from queue import Empty, SimpleQueue
from time import monotonic
from typing import TypeAlias

from kempner.cluster.slurm.hostlist import node_of
from kempner.config.sections import Config
from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    Event,
    News,
    Outcome,
    PeerLost,
    Phase,
    RankMessage,
    Stop,
)
from kempner.run.link.messages import shorten
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import LEFT_EARLY, ExitCode, StopReason, reason_of_signal
from kempner.run.process.signals import ReceivedSignal
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import (
    CheckpointCommitted,
    Completed,
    ConnectionsStalled,
    Evaluated,
    GpuFailed,
    LedgerEvent,
    NodeSuspected,
    RankReady,
    Signalled,
    StandsAt,
    Stopped,
    StopRequested,
    parse_event,
)
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.rank_connections import RankChannel, RankRoster
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.monitors.advisers import MemoryMonitor, StragglerMonitor, explained
from kempner.supervisor.monitors.base import (
    Hang,
    Monitors,
    RankConditions,
    Reporter,
    RunTimes,
    Snapshot,
)
from kempner.supervisor.monitors.deadlocks import DeadlockDetector
from kempner.supervisor.monitors.hangs import (
    NODES_ANSWER,
    NOT_KILLED,
    HangDetector,
    HangEvidence,
    describe_stuck,
    local_processes,
)
from kempner.supervisor.policy.outcome import RankExit, ReportedLoop, describe_exit, failed
from kempner.supervisor.policy.stop import (
    AttemptLife,
    AttemptState,
    Deadline,
    StopOrder,
    StopSoFar,
    Trigger,
    renew,
    time_to_abandon,
)
from kempner.supervisor.slurm.job_monitor import JobSeen, JobView

LOOK = 0.5
"""Seconds between looks at the clock; whatever happens ends the wait at once."""

EXIT_GRACE = 5.0
"""Seconds after the last word of the last rank that its process may take to be gone."""

KILLED_WITHIN = 15.0
"""Seconds within which a rank that was killed is gone, unless it is stuck in the kernel."""

RESTART_TAKES = 60.0
"""Seconds from the end of an attempt to the first step of the next one."""

SURE_AFTER = 5.0
"""Seconds after a SIGKILL from which on a rank that is still there is known to be stuck."""

EXPLAINED_WITHIN = 3.0
"""Seconds within which Slurm says why a signal came. So long the ledger waits for the reason; the
ranks are told at once."""


@dataclass(frozen=True)
class UserStopSignal:
    """A signal by which this process told itself that a person has asked for a stop."""

    received: ReceivedSignal


_UNEXPLAINED = (StopReason.SIGNAL, StopReason.PEER_STOPPED)
"""Of these Slurm may know the reason."""

AttemptEvent: TypeAlias = ReceivedSignal | UserStopSignal | RankExit | News | JobSeen


class AttemptFollower:
    """Follows one attempt. Times are seconds of a clock that stands still while suspended."""

    def __init__(
        self,
        attempt: Attempt,
        roster: RankRoster,
        config: Config,
        launcher: Launcher,
        channel: RankChannel,
        ledger: Ledger,
        job: JobView,
        times: RunTimes,
    ) -> None:
        self.attempt, self.roster, self.job = attempt, roster, job
        self._launcher, self._channel = launcher, channel
        self.times, self.stop = times, StopSoFar()
        self._record = partial(ledger.record, attempt=attempt.number)
        supervise, resilience, now = config.supervise, config.resilience, times.now()
        graces = {
            Deadline.STOP: supervise.stop_grace,
            Deadline.CRASH: supervise.crash_grace,
            Deadline.EVIDENCE: NODES_ANSWER,
            Deadline.ABANDON: KILLED_WITHIN,
        }
        self.life = AttemptLife(graces, AttemptState.LAUNCHING, now)
        usual_step = times.phases.usual().get(Phase.STEP)
        self._monitors = Monitors(
            times.phases,
            DeadlockDetector(),
            HangDetector(resilience, now, roster.must_report, times.hung),
            advisers=(
                StragglerMonitor(resilience, None if usual_step is None else usual_step.median),
                MemoryMonitor(resilience),
            ),
        )
        self.evidence = HangEvidence(attempt.number, channel.tell, ledger, launcher.look)
        self._reporter = Reporter(attempt.number, ledger, resilience.straggler_is_suspect)

    @property
    def ends(self) -> list[RankExit]:
        """How ranks ended, in the order of the first sign of it."""
        usage, ends = self._channel.usage, self.roster.ends
        if self.reports_nothing:
            # One may have said more since; or the signal that ended it came here a moment later.
            asked = self.stop.standing is not None
            ends = [self._channel.interpret(replace(end, asked=end.asked or asked)) for end in ends]
        return [explained(end, usage, self.roster.joined) for end in ends]

    @property
    def reports_nothing(self) -> bool:
        """Whether it is a program that has not said a word over the channel."""
        return not (self.roster.must_report or self.roster.joined)

    @property
    def left_with_0_alone(self) -> bool:
        """Whether such a program has left with what would be a stop if it was asked to stop."""
        ends = [self._channel.interpret(replace(end, asked=True)) for end in self.roster.ends]
        return self.reports_nothing and any(end.code == ExitCode.STOPPED for end in ends)

    @property
    def was_signalled(self) -> bool:
        """Whether the ranks were asked to stop, in whatever way, or Slurm is ending the job."""
        by_us = self.stop.standing is not None or any(end.asked for end in self.roster.ends)
        return by_us or self.stop.signalled or self.job.is_ending()

    @property
    def steps_done(self) -> int:
        seen = self._channel.last_reports().values()
        return max((last.report.step for last in seen), default=0)

    def step_of(self, rank: int | None) -> int:
        """The step that a rank was in when last heard, or had done where it was in none.

        The furthest of all for None, and for a rank that never said where it is."""
        seen = self._channel.last_reports()
        reports = [seen[rank].report] if rank in seen else [s.report for s in seen.values()]
        return max((r.step + (r.phase in (Phase.COMPILE, Phase.STEP)) for r in reports), default=0)

    def too_late_to_restart(self) -> bool:
        """Whether the job's end is so near that new ranks would have to stop at once."""
        return self.job.ends_within(RESTART_TAKES, self.times)

    def must_stop(self) -> bool:
        """Whether only the time for a stop is left of the job's time."""
        return self.job.ends_within(0.0, self.times)

    @property
    def trains(self) -> bool:
        return self.life.state is AttemptState.RUNNING and self._snapshot().trains

    def seconds_run(self) -> float:
        return self.times.now() - (self.seconds_ending() or 0.0)

    def seconds_ending(self) -> float | None:
        """Since the first rank ended; None if none has."""
        first = self.roster.first_ended_at
        return None if first is None else self.times.now() - first

    def take_in(self, incoming: SimpleQueue[AttemptEvent], *, wait: bool = True) -> None:
        """Act on all that has happened; `wait` until something has, or `LOOK` seconds are over."""
        try:
            self._act_on(incoming.get(wait, LOOK))
            while True:
                self._act_on(incoming.get_nowait())
        except Empty:
            return

    def enforce(self) -> None:
        """Stop in time, and end what outstays: a connection, a stop, the failure of another."""
        snapshot = self._snapshot()
        findings = self._monitors.check(snapshot)
        self._tell_of_gpus()
        if self.job.id is not None:
            self._stop_for_job_end()
        for hang in (finding for finding in findings if isinstance(finding, Hang)):
            self._end_a_hang(hang, snapshot)
        reports, all_are_due = self._channel.last_reports(), self.life.holds(Deadline.JOIN)
        for end in self.roster.missing(reports, snapshot.now, all_are_due):
            self._note_end(end)
        collected = self.life.state is AttemptState.COLLECTING_EVIDENCE
        known = collected and self.evidence.complete(snapshot)
        over = known or snapshot.now > self.life.until
        time_up = over and self._end_its_time(snapshot.now)
        if self.life.state is AttemptState.KILLING:
            self._launcher.kill()
        if time_up and collected:
            self.evidence.close(snapshot)
        ended_for = self.roster.ended_for(snapshot.now)
        if not self._launcher.alive() or (ended_for is not None and ended_for > EXIT_GRACE):
            outstayed = self._launcher.alive() and local_processes(self.roster.joined)
            self._advance(Trigger.OUTSTAYED if outstayed else Trigger.ALL_ENDED)
        if self.life.over or self.life.state is AttemptState.KILLING:
            self.times.ranks_left()
        for finding in findings:
            if not isinstance(finding, Hang):
                self._reporter.report(finding, snapshot)
        self._record_stop(snapshot.now)

    def _tell_of_gpus(self) -> None:
        for node, told in self._launcher.gpu_news():
            reason = f"{told.reason} on {node}"
            logger().warning(reason)
            self._record(GpuFailed(node, told.gpu, told.xid, reason))
            if told.broken:
                self._record(NodeSuspected(node, told.reason))

    def _end_its_time(self, now: float) -> bool:
        """Leave behind who outlives a kill; whether who is left is to be killed now."""
        if self.life.state is AttemptState.KILLING:
            self._leave_behind(now)
        left = self.job.seconds_left(now)
        return self._advance(Trigger.TIME_UP, time_to_abandon(left, KILLED_WITHIN))

    def _leave_behind(self, now: float) -> None:
        """Name the ranks that outlive a SIGKILL, and their nodes: nothing else can start there."""
        sure = now - self.life.since >= SURE_AFTER
        stuck = {**self.roster.survivors(), **local_processes(self.roster.joined)} if sure else {}
        gone = self.roster.joined.keys() - self.roster.survivors().keys()
        for rank in self.roster.not_ended():
            cause = "" if rank in gone else NOT_KILLED
            self._note_end(RankExit(rank, None, ended_by_us=bool(cause), sentence=cause))
        for rank, there in stuck.items():
            if reason := describe_stuck(rank, there):
                logger().error(f"{there.host} is not used again: {reason}")
                self.roster.stuck[rank] = there
                self._record(NodeSuspected(there.host, reason))

    def tell_phase_durations(self) -> None:
        """Note for the next attempt how long the phases of this one took, and what is left."""
        self._record_stop()
        for finding in self.times.phases.findings():
            self._reporter.report(finding, self._snapshot())

    def _snapshot(self) -> Snapshot:
        return Snapshot.of(
            self.times.now(),
            self.roster.size,
            self._channel.last_reports(),
            monotonic(),
            self.times.phases.usual(),
            self._channel.usage,
            self.roster.joined,
            RankConditions(
                self.times.clock.woke_at,
                self._launcher.agents.waits,
                frozenset(end.rank for end in self.roster.ends),
                self._launcher.activity(),
            ),
        )

    def _advance(self, trigger: Trigger, within: float = inf) -> bool:
        """Take in a trigger, whose deadline is at most `within` seconds from now; whether the state
        changes."""
        before, self.life = self.life, self.life.after(trigger, self.times.now(), within)
        if self.life.state is before.state:
            return False
        lasted = round(self.life.since - before.since, 1)
        change = f"{before.state} -> {self.life.state}"
        logger().debug(change, because=trigger.value, after=lasted)
        return True

    def _end_a_hang(self, hang: Hang, snapshot: Snapshot) -> None:
        """Collect evidence first, unless a stop or a failure ends the attempt anyway."""
        if self._advance(Trigger.HANG_FOUND):
            if not hang.deadlock:
                self.times.phases.note_false_hang(hang.phase, hang.still)
            self.evidence.collect(hang, snapshot)

    def _act_on(self, attempt_event: AttemptEvent) -> None:
        match attempt_event:
            case ReceivedSignal():
                self._pass_on(attempt_event)
            case UserStopSignal(received):
                self._stop_for_user(received)
            case RankExit():
                self._note_end(attempt_event)
            case JobSeen() as seen:
                self.job.take_in(seen, self.times.now())
            case Connected():
                self._note_connection(attempt_event)
            case Disconnected() as gone:
                self.roster.disconnected(gone, self.times.now())
                logger().info("rank disconnected", rank=gone.rank, reason=gone.reason)
            case RankMessage(rank, Event() as said):
                self._hear(rank, parse_event(said.name, said.fields))
            case RankMessage(rank, Outcome() as outcome):
                self._note_end(RankExit(rank, outcome.code, sentence=outcome.sentence))

    def _note_connection(self, there: Connected) -> None:
        node = node_of(there.host, self._launcher.nodes.all)
        self.roster.connected(replace(there, host=node), self.times.now())
        self._advance(Trigger.ALL_JOINED if self.roster.all_joined else Trigger.RANK_JOINED)
        logger().info("rank connected", rank=there.rank, host=there.host, pid=there.pid)

    def _hear(self, rank: int, event: LedgerEvent | None) -> None:
        match event:
            case None:
                logger().warning("a line of this rank does not go into the ledger", rank=rank)
            case ConnectionsStalled() | StandsAt():
                self.evidence.hear(rank, event)
            case CheckpointCommitted():
                counts = event.took is None or self.times.saved(event.took)
                self._record(event if counts else replace(event, suspended=True))
            case Evaluated():
                self.times.evaluated(event.seconds)
                self._record(event)
            case Completed() | RankReady():
                if not self.roster.must_report:
                    complete = isinstance(event, Completed)
                    self.stop.loop = ReportedLoop.COMPLETE if complete else ReportedLoop.UNDER_WAY
                self._record(event)
            case Stopped():
                self.stop.said = StopReason.of_label(event.reason)
                self._record(event)
            case _:
                self._record(event)
        if isinstance(event, Signalled):
            self.stop.signalled = True
            self.job.look()

    def _pass_on(self, received: ReceivedSignal) -> None:
        self.stop.signals.append(received)
        self.job.look()  # it knows why, and until when
        reason, sentence = reason_of_signal(received.signal), received.signal.name
        left, grace = self.job.seconds_left(self.times.now()), self.life.graces[Deadline.STOP]
        within = grace if left is None else min(grace, max(0.0, left))
        self.ask_to_stop(StopOrder(reason, sentence, within))

    def _stop_for_user(self, received: ReceivedSignal) -> None:
        """A person has asked for a stop with `kempner stop`: no signal is Slurm's warning then."""
        self.stop.signals.append(received)
        self.stop.by_user = True
        within = self.life.graces[Deadline.STOP]
        self.ask_to_stop(StopOrder(StopReason.OPERATOR, "kempner stop", within))

    def _stop_for_job_end(self) -> None:
        if (warning := self.job.warning(self.times)) is not None:
            logger().warning(warning)
        order = self.job.stop_order(self.times, () if self.stop.by_user else self.stop.signals)
        if order is not None:
            self.ask_to_stop(order)

    def ask_to_stop(self, order: StopOrder) -> None:
        """Ask the ranks once, and again whenever there is more to say."""
        now, before = self.times.now(), self.stop.standing
        first, standing = before is None, renew(before, order, now)
        if standing is None:
            return
        self.stop.standing, seconds_left = standing, max(0.0, standing.by - now)
        self._channel.tell(Stop(standing.reason, shorten(standing.sentence), seconds_left))
        self._advance(Trigger.STOP_REQUESTED, seconds_left)
        if first:
            logger().warning(f"{standing.sentence}: stopping after this step, with a checkpoint")
        told = StopRequested(standing.reason.label, standing.sentence, round(seconds_left, 1))
        self.stop.unrecorded = (told, now)
        if self.job.id is None or standing.reason not in _UNEXPLAINED:
            self._record_stop()

    def _record_stop(self, now: float = inf) -> None:
        """Tell the ledger of the stop, unless Slurm may still say at `now` why there is one."""
        if self.stop.unrecorded is None:
            return
        told, since = self.stop.unrecorded
        if now - since > EXPLAINED_WITHIN or self.life.over:
            self.stop.unrecorded = None
            self._record(told)

    def _note_end(self, end: RankExit) -> None:
        if not (self.roster.must_report or end.rank in self.roster.joined):
            # What its exit means is not said over the channel.
            asked = replace(end, asked=end.asked or self.stop.standing is not None)
            end = self._channel.interpret(asked, look=not self.roster.any_failed)
        first_to_fail = failed(end) and not self.roster.any_failed
        if not self.roster.ended(end, self.times.now()):
            return  # its own words came first and say more than its exit status
        if first_to_fail and self.stop.loop is not ReportedLoop.COMPLETE:
            # After the last step the others may still evaluate, or export: they need not wait.
            self._channel.tell(PeerLost(end.rank, shorten(describe_exit(end))))
            self._advance(Trigger.RANK_FAILED)
        logger().info("rank ended", rank=end.rank, how=describe_exit(end))
        if end.code == ExitCode.STOPPED and self.stop.standing is None:
            # A rank that was signalled alone, before it knew the others: they would wait for it.
            # What the ranks have said of it meanwhile is better than that one of them was asked.
            reason = self.stop.said or StopReason.PEER_STOPPED
            sentence = f"rank {end.rank} was asked to stop"
            self.job.look()  # a preemption signals the ranks alone
            self.ask_to_stop(StopOrder(reason, sentence, self.life.graces[Deadline.STOP]))
        if end.code == ExitCode.STOPPED and self.roster.left_early(end):
            # Others may have met it a moment before: no order frees them, since they wait for it.
            self._channel.tell(PeerLost(end.rank, LEFT_EARLY))
