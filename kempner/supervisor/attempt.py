"""What the supervisor knows of the attempt under way, and does about it at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import TypeAlias

from kempner.cluster.slurm.hostlist import node_of
from kempner.cluster.slurm.job import JobState
from kempner.config.sections import Config
from kempner.run.control.protocol import (
    EVALUATED,
    SIGNALLED,
    STALLED,
    STOPPED,
    Event,
    Outcome,
    PeerLost,
    Phase,
    Stop,
    shorten,
)
from kempner.run.process.awake_clock import AwakeClock
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.logs import logger
from kempner.run.process.signals import Received
from kempner.run.process.stop_reason import StopReason, reason_of_signal
from kempner.run.record.attempts import Attempt
from kempner.run.record.ledger import Ledger
from kempner.run.record.save_times import COMMITTED, SUSPENDED, Durations, SaveSeconds
from kempner.supervisor.control.events import Connected, Disconnected, Heard, LastReport, News
from kempner.supervisor.control.server import ControlServer
from kempner.supervisor.launchers.base import Launcher
from kempner.supervisor.monitors.hang_detector import Hang
from kempner.supervisor.monitors.hang_evidence import HangEvidence
from kempner.supervisor.monitors.oom import explained
from kempner.supervisor.monitors.phase_stats import PhaseStats
from kempner.supervisor.monitors.reporter import Reporter
from kempner.supervisor.policy.outcome import RankExit, describe_exit, failed
from kempner.supervisor.policy.stop import (
    StandingStop,
    StopOrder,
    decide_stop,
    renew,
    stop_lead,
)
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobSeen

LOOK = 0.5
"""Seconds between looks at the clock; whatever happens ends the wait at once."""

RECONNECT = 3.0
"""Seconds within which a rank whose connection broke off has to be back, or it is gone. One that
lives tries again after a tenth of a second. While steps are made, every rank is there: they count
from the last one."""

JOIN = 120.0
"""Seconds after another has joined within which a rank joins, or it is gone: srun does not tell
when one of its tasks has ended. A rank joins before it imports torch."""

EXIT_GRACE = 5.0
"""Seconds after the last word of the last rank that its process may take to be gone."""

AttemptEvent: TypeAlias = Received | RankExit | News | JobSeen


class Watch:
    """Follows one attempt. Times are seconds of a clock that stands still while suspended.

    Ranks that `must_report` hang if they never do; of others that never do nothing is known.
    """

    def __init__(
        self,
        attempt: Attempt,
        size: int,
        config: Config,
        launcher: Launcher,
        channel: ControlServer,
        ledger: Ledger,
        durations: Durations,
        job: JobMonitor | None,
        phase_stats: PhaseStats | None = None,
        must_report: bool = True,
    ) -> None:
        self.attempt, self._size, self._section = attempt, size, config.supervise
        self._launcher, self._channel, self._ledger = launcher, channel, ledger
        self._durations, self._job = durations, job
        self._must_report = must_report
        self._clock, self._pace = AwakeClock(), phase_stats or PhaseStats()
        self._ends: dict[int, tuple[float, RankExit]] = {}
        self.job_at_first: JobState | None = None
        """The job as it was when the attempt began, if Slurm has said so yet."""
        self._job_now: JobSeen | None = None
        self._job_ends: float | None = None
        self.signals: list[Received] = []
        self._stop: StandingStop | None = None
        self._stop_asked_at: float | None = None
        self._stopped_for = StopReason.NONE
        self._failed_at: float | None = None
        self._ended_at = 0.0
        self._parted: dict[int, float] = {}
        self._reached, self._reached_at = 0, 0.0
        self._joined: dict[int, Connected] = {}
        self._joined_at = 0.0
        self._hangs = HangEvidence(
            attempt.number,
            config.resilience,
            channel,
            ledger,
            None if job is None else job.id,
            self._clock.now(),
        )
        self.notes = Reporter(attempt.number, size, config.resilience, ledger, self._pace)

    @property
    def hang(self) -> Hang | None:
        """What the attempt was ended for, if nothing moved any more."""
        return self._hangs.found

    @property
    def stop_reason(self) -> StopReason:
        """Why the ranks were asked to stop, or said that they do; NONE if nobody asked them."""
        if self._stop is None:
            return StopReason.NONE
        if self._stop.reason is StopReason.PEER_STOPPED and self._stopped_for:
            return self._stopped_for  # they know why that one was asked
        return max(self._stop.reason, self._stopped_for)

    @property
    def ends(self) -> list[RankExit]:
        """How ranks ended, in the order of the first sign of it."""
        usage = self._channel.usage()
        in_order = sorted(self._ends.values(), key=itemgetter(0))
        return [explained(end, usage, self._joined) for _, end in in_order]

    def furthest_step(self) -> int:
        """The last step that any rank reported."""
        reports = (last_report.report.step for last_report in self._channel.last_reports().values())
        return max(reports, default=0)

    def step_of(self, rank: int | None) -> int:
        """The step that a rank was in when last heard, or had done where it was in none.

        The furthest of all for None, and for a rank that never said where it is.
        """
        seen = self._channel.last_reports()
        reports = [seen[rank].report] if rank in seen else [s.report for s in seen.values()]
        return max((r.step + (r.phase in (Phase.COMPILE, Phase.STEP)) for r in reports), default=0)

    def host_of(self, rank: int | None) -> str:
        """Where a rank ran, or nothing if it never joined."""
        return self._joined[rank].host if rank in self._joined else ""

    def lost_hosts(self) -> list[str]:
        """Where ranks are gone of whose end nobody knows more: their machines may be gone, too."""
        lost = (end.rank for end in self.ends if end.status is None and not end.ended_by_us)
        return sorted({self._joined[rank].host for rank in lost if rank in self._joined})

    def over(self) -> bool:
        """Whether nothing is left to follow."""
        if len(self._ends) < self._size:
            return not self._launcher.alive()
        return not self._launcher.alive() or self._clock.now() - self._ended_at > EXIT_GRACE

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
        now, section = self._clock.now(), self._section
        last_reports = self._channel.last_reports()
        self._pace.see(last_reports, now)
        self._heed_the_job()
        if last_reports or self._must_report:
            self._end_a_hang(now, last_reports)
        if self.furthest_step() > self._reached:
            self._reached, self._reached_at = self.furthest_step(), now
        self.notes.see(now, last_reports, self._channel.usage(), self._joined)
        for rank, at in list(self._parted.items()):
            if now - max(at, self._reached_at) > RECONNECT:
                self._note_end(RankExit(rank, None))
        if self._must_report and self._joined and now - self._joined_at > JOIN:
            for rank in set(range(self._size)) - self._joined.keys():
                self._note_end(RankExit(rank, None, sentence="it has never joined"))
        overdue = self._stop_asked_at is not None and now - self._stop_asked_at > section.stop_grace
        orphaned = self._failed_at is not None and now - self._failed_at > section.crash_grace
        if overdue or orphaned:
            self._launcher.kill()

    def _end_a_hang(self, now: float, last_reports: Mapping[int, LastReport]) -> None:
        known = self.hang is not None
        if not known and (self._stop_asked_at is not None or self._failed_at is not None):
            return  # these have deadlines of their own
        self._hangs.see(now, last_reports, self._joined, self._pace.usual())
        if self.hang is not None and not known:
            self._pace.misjudged(self.hang.phase, self.hang.still)
        if self._hangs.over:
            self._launcher.kill()

    def _act_on(self, attempt_event: AttemptEvent) -> None:
        match attempt_event:
            case Received():
                self._pass_on(attempt_event)
            case RankExit():
                self._note_end(attempt_event)
            case JobSeen() as seen:
                self._note_job(seen)
            case Connected():
                logger().info(
                    "joined",
                    rank=attempt_event.rank,
                    host=attempt_event.host,
                    pid=attempt_event.pid,
                )
                self._parted.pop(attempt_event.rank, None)
                node = node_of(attempt_event.host, self._launcher.nodes)
                self._joined[attempt_event.rank] = replace(attempt_event, host=node)
                self._joined_at = self._clock.now()
            case Disconnected():
                logger().info("parted", rank=attempt_event.rank, reason=attempt_event.reason)
                if attempt_event.rank not in self._ends:
                    self._parted[attempt_event.rank] = self._clock.now()
            case Heard(rank, Event(name=name) as event) if name == STALLED:
                self._hangs.hear(rank, event.fields["ends"])
            case Heard(_, Event() as event):
                self._record(event)
            case Heard(rank, Outcome() as outcome):
                self._note_end(RankExit(rank, outcome.code, sentence=outcome.sentence))

    def _record(self, event: Event) -> None:
        fields = {"attempt": self.attempt.number, **event.fields}
        if event.name == COMMITTED:
            save = SaveSeconds.from_fields(event.fields)
            if self._clock.stood_still(save.total):
                fields[SUSPENDED] = True
            else:
                self._durations = self._durations.with_another(save)
                self._pace.took(Phase.SAVE, save.total)
        elif event.name == STOPPED:
            self._stopped_for = StopReason.of_label(event.fields.get("reason"))
        elif event.name == EVALUATED:
            took = event.fields.get("seconds")
            if isinstance(took, float) and not self._clock.stood_still(took):
                self._pace.took(Phase.EVAL, took)
        self._ledger.record(event.name, **fields)
        if event.name == SIGNALLED and self._job is not None:
            self._job.look()

    def _pass_on(self, received: Received) -> None:
        self.signals.append(received)
        if self._job is not None:
            self._job.look()  # it knows why, and until when
        reason, sentence = reason_of_signal(received.signal), received.signal.name
        self._ask_to_stop(StopOrder(reason, sentence, self._section.stop_grace))

    def _note_job(self, seen: JobSeen) -> None:
        self.job_at_first = self.job_at_first or seen.state
        self._job_now, left = seen, seen.seconds_left
        # By our clock: Slurm, too, does not count the time for which it suspends a job.
        self._job_ends = None if left is None else self._clock.now() + left

    def _heed_the_job(self) -> None:
        """Ask for a stop when the job's end is near, or Slurm is about to end it."""
        if self.job_at_first is None or self._job_now is None:
            return
        job, gap = self._job_now.state, self._pace.quantile(0.95)
        advice = decide_stop(
            self.job_at_first,
            job,
            self._job_now.kill_wait,
            left=None if self._job_ends is None else self._job_ends - self._clock.now(),
            lead=stop_lead(self._durations, gap, job.time_limit),
            warned=bool(self.signals),
        )
        if advice is not None:
            self._ask_to_stop(advice)

    def _ask_to_stop(self, order: StopOrder) -> None:
        """Ask once, and again whenever there is more to say."""
        now = self._clock.now()
        standing = renew(self._stop, order, now)
        if standing is None:
            return
        self._stop, seconds_left = standing, standing.by - now
        self._channel.tell(
            Stop(standing.reason, shorten(standing.sentence), max(0.0, seconds_left))
        )
        if self._stop_asked_at is None:
            self._stop_asked_at = now
            logger().warning(f"{standing.sentence}: stopping after this step, with a checkpoint")
            self._launcher.ask_to_stop()
        self._ledger.record(
            "stop_requested",
            attempt=self.attempt.number,
            reason=standing.reason.label,
            sentence=standing.sentence,
            seconds_left=round(seconds_left, 1),
        )

    def _note_end(self, end: RankExit) -> None:
        if end.rank in self._ends:
            return  # its own words came first and say more than its exit status
        logger().info("ended", rank=end.rank, how=describe_exit(end))
        self._ended_at = self._clock.now()
        self._ends[end.rank] = (self._parted.pop(end.rank, self._ended_at), end)
        if failed(end) and self._failed_at is None:
            self._failed_at = self._ended_at
            self._channel.tell(PeerLost(end.rank, shorten(describe_exit(end))))
        if end.status == ExitCode.STOPPED and self._stop_asked_at is None:
            # A rank that was signalled alone, before it knew the others: they would wait for it.
            # What the ranks have said of it meanwhile is better than that one of them was asked.
            reason = self._stopped_for or StopReason.PEER_STOPPED
            sentence = f"rank {end.rank} was asked to stop"
            self._ask_to_stop(StopOrder(reason, sentence, self._section.stop_grace))
