"""`AttemptFollower` follows the attempt under way: it handles signals, ranks' messages and job
states, enforces deadlines, and records events. `policy.stop` has the attempt's states; `monitors`
judge its progress."""

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
    StopStatus,
    Trigger,
    renew,
    time_to_abandon,
)
from kempner.supervisor.slurm.job_monitor import JobSeen, JobView

LOOK = 0.5
"""Seconds between two checks without an event."""

EXIT_GRACE = 5.0
"""Seconds for the processes to exit after the last rank has reported its end."""

KILLED_WITHIN = 15.0
"""Seconds within which a killed rank is gone, unless it is stuck in the kernel."""

RESTART_TAKES = 60.0
"""Seconds from the end of an attempt to the first step of the next one."""

SURE_AFTER = 5.0
"""Seconds after SIGKILL after which a rank that is left is certainly stuck."""

EXPLAINED_WITHIN = 3.0
"""Seconds to wait for Slurm to explain a signal, before the stop goes into the ledger; the ranks
are told at once."""


@dataclass(frozen=True)
class UserStopSignal:
    """A signal that this process sent to itself because of `kempner stop`."""

    received: ReceivedSignal


_UNEXPLAINED = (StopReason.SIGNAL, StopReason.PEER_STOPPED)
"""Reasons that Slurm may explain further."""

AttemptEvent: TypeAlias = ReceivedSignal | UserStopSignal | RankExit | News | JobSeen


class AttemptFollower:
    """Follows one attempt. Times are seconds of a clock that stops while this process is
    suspended."""

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
        self.times, self.stop = times, StopStatus()
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
        """The ends of ranks, in the order of their first sign."""
        usage, ends = self._channel.usage, self.roster.ends
        if self.reports_nothing:
            # Its files may say more by now, and the signal that ended it may have come here later.
            asked = self.stop.standing is not None
            ends = [self._channel.interpret(replace(end, asked=end.asked or asked)) for end in ends]
        return [explained(end, usage, self.roster.joined) for end in ends]

    @property
    def reports_nothing(self) -> bool:
        """Whether it is a program that has not used the control channel."""
        return not (self.roster.must_report or self.roster.joined)

    @property
    def left_with_0_alone(self) -> bool:
        """Whether such a program has exited with a code that means stopped if it was asked to
        stop."""
        ends = [self._channel.interpret(replace(end, asked=True)) for end in self.roster.ends]
        return self.reports_nothing and any(end.code == ExitCode.STOPPED for end in ends)

    @property
    def was_signalled(self) -> bool:
        """Whether the ranks were asked to stop in any way, or Slurm is ending the job."""
        by_us = self.stop.standing is not None or any(end.asked for end in self.roster.ends)
        return by_us or self.stop.signalled or self.job.is_ending()

    @property
    def steps_done(self) -> int:
        seen = self._channel.last_reports().values()
        return max((last.report.step for last in seen), default=0)

    def step_of(self, rank: int | None) -> int:
        """The step in which a rank was at its last report, or the last one it had done. For None,
        and for a rank without reports, the largest of all ranks."""
        seen = self._channel.last_reports()
        reports = [seen[rank].report] if rank in seen else [s.report for s in seen.values()]
        return max((r.step + (r.phase in (Phase.COMPILE, Phase.STEP)) for r in reports), default=0)

    def too_late_to_restart(self) -> bool:
        """Whether the job's end is so near that new ranks would have to stop at once."""
        return self.job.ends_within(RESTART_TAKES, self.times)

    def must_stop(self) -> bool:
        """Whether the rest of the job's time is needed for a stop."""
        return self.job.ends_within(0.0, self.times)

    @property
    def trains(self) -> bool:
        return self.life.state is AttemptState.RUNNING and self._snapshot().trains

    def seconds_run(self) -> float:
        return self.times.now() - (self.seconds_ending() or 0.0)

    def seconds_ending(self) -> float | None:
        """Seconds since the first rank ended; None if none has."""
        first = self.roster.first_ended_at
        return None if first is None else self.times.now() - first

    def take_in(self, incoming: SimpleQueue[AttemptEvent], *, wait: bool = True) -> None:
        """Handle all incoming events; `wait` for one, at most `LOOK` seconds."""
        try:
            self._act_on(incoming.get(wait, LOOK))
            while True:
                self._act_on(incoming.get_nowait())
        except Empty:
            return

    def enforce(self) -> None:
        """Run the monitors, stop in time, and enforce the deadlines."""
        snapshot = self._snapshot()
        findings = self._monitors.check(snapshot)
        self._record_gpu_errors()
        if self.job.id is not None:
            self._stop_for_job_end()
        for hang in (finding for finding in findings if isinstance(finding, Hang)):
            self._handle_hang(hang, snapshot)
        reports, all_are_due = self._channel.last_reports(), self.life.holds(Deadline.JOIN)
        for end in self.roster.missing(reports, snapshot.now, all_are_due):
            self._note_end(end)
        collected = self.life.state is AttemptState.COLLECTING_EVIDENCE
        known = collected and self.evidence.complete(snapshot)
        over = known or snapshot.now > self.life.until
        time_up = over and self._handle_time_up(snapshot.now)
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

    def _record_gpu_errors(self) -> None:
        for node, report in self._launcher.gpu_news():
            reason = f"{report.reason} on {node}"
            logger().warning(reason)
            self._record(GpuFailed(node, report.gpu, report.xid, reason))
            if report.broken:
                self._record(NodeSuspected(node, report.reason))

    def _handle_time_up(self, now: float) -> bool:
        """Abandon ranks that survive a kill; whether the others are to be killed now."""
        if self.life.state is AttemptState.KILLING:
            self._abandon_ranks(now)
        left = self.job.seconds_left(now)
        return self._advance(Trigger.TIME_UP, time_to_abandon(left, KILLED_WITHIN))

    def _abandon_ranks(self, now: float) -> None:
        """Record the ranks that survive SIGKILL, and their nodes, which are not used again."""
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
        """Record the durations of this attempt's phases for the next one, and an unrecorded
        stop."""
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
        """Apply a trigger, with a deadline at most `within` seconds from now; whether the state
        changes."""
        before, self.life = self.life, self.life.after(trigger, self.times.now(), within)
        if self.life.state is before.state:
            return False
        lasted = round(self.life.since - before.since, 1)
        change = f"{before.state} -> {self.life.state}"
        logger().debug(change, because=trigger.value, after=lasted)
        return True

    def _handle_hang(self, hang: Hang, snapshot: Snapshot) -> None:
        """Collect evidence before the kill, unless a stop or a failure ends the attempt anyway."""
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
            case RankMessage(rank, Event(name=name, fields=fields)):
                self._hear(rank, parse_event(name, fields))
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
                self.stop.ranks_reason = StopReason.of_label(event.reason)
                self._record(event)
            case _:
                self._record(event)
        if isinstance(event, Signalled):
            self.stop.signalled = True
            self.job.look()

    def _pass_on(self, received: ReceivedSignal) -> None:
        self.stop.signals.append(received)
        self.job.look()  # Slurm knows why, and until when
        reason, sentence = reason_of_signal(received.signal), received.signal.name
        left, grace = self.job.seconds_left(self.times.now()), self.life.graces[Deadline.STOP]
        within = grace if left is None else min(grace, max(0.0, left))
        self.ask_to_stop(StopOrder(reason, sentence, within))

    def _stop_for_user(self, received: ReceivedSignal) -> None:
        """Stop because of `kempner stop`; then no signal is Slurm's warning."""
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
        """Ask the ranks to stop, and again if the order says more than the one before."""
        now, before = self.times.now(), self.stop.standing
        first, standing = before is None, renew(before, order, now)
        if standing is None:
            return
        self.stop.standing, seconds_left = standing, max(0.0, standing.by - now)
        self._channel.tell(Stop(standing.reason, shorten(standing.sentence), seconds_left))
        self._advance(Trigger.STOP_REQUESTED, seconds_left)
        if first:
            logger().warning(f"{standing.sentence}: stopping after this step, with a checkpoint")
        event = StopRequested(standing.reason.label, standing.sentence, round(seconds_left, 1))
        self.stop.unrecorded = (event, now)
        if self.job.id is None or standing.reason not in _UNEXPLAINED:
            self._record_stop()

    def _record_stop(self, now: float = inf) -> None:
        """Record the stop, unless Slurm may still explain it at `now`."""
        if self.stop.unrecorded is None:
            return
        event, since = self.stop.unrecorded
        if now - since > EXPLAINED_WITHIN or self.life.over:
            self.stop.unrecorded = None
            self._record(event)

    def _note_end(self, end: RankExit) -> None:
        if not (self.roster.must_report or end.rank in self.roster.joined):
            # The program does not report what its exit means.
            asked = replace(end, asked=end.asked or self.stop.standing is not None)
            end = self._channel.interpret(asked, look=not self.roster.any_failed)
        first_to_fail = failed(end) and not self.roster.any_failed
        if not self.roster.ended(end, self.times.now()):
            return  # the rank's own report came first and says more than its exit status
        if first_to_fail and self.stop.loop is not ReportedLoop.COMPLETE:
            # After the last step the others may still evaluate or export, without this rank.
            self._channel.tell(PeerLost(end.rank, shorten(describe_exit(end))))
            self._advance(Trigger.RANK_FAILED)
        logger().info("rank ended", rank=end.rank, how=describe_exit(end))
        if end.code == ExitCode.STOPPED and self.stop.standing is None:
            # Only this rank was signalled, before it had met the others, which would wait for it.
            # A reason that the ranks have reported meanwhile is better than PEER_STOPPED.
            reason = self.stop.ranks_reason or StopReason.PEER_STOPPED
            sentence = f"rank {end.rank} was asked to stop"
            self.job.look()  # in a preemption Slurm signals only the ranks
            self.ask_to_stop(StopOrder(reason, sentence, self.life.graces[Deadline.STOP]))
        if end.code == ExitCode.STOPPED and self.roster.left_early(end):
            # Others may have met it just before and wait for it, so an order to stop is not enough.
            self._channel.tell(PeerLost(end.rank, LEFT_EARLY))
