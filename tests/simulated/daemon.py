"""The supervisor in a simulated job: the order of `kempner.supervisor.daemon` and `attempt`.

Every decision is the real one; what is modelled is when it hears of what.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import asdict, replace
from math import inf
from operator import itemgetter
from typing import TYPE_CHECKING, TypeAlias, TypeVar

from kempner.cluster.slurm.allocation import Allocation, without
from kempner.cluster.slurm.command import next_pause
from kempner.cluster.slurm.job import JobState
from kempner.run.control.protocol import Phase
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.events import AttemptFailed, NotRequeued, Requeued, RunGivenUp
from kempner.supervisor.attempt import RESTART_TAKES
from kempner.supervisor.monitors.base import Hang, PhaseStats, Snapshot, learned, to_event
from kempner.supervisor.monitors.hangs import HangDetector
from kempner.supervisor.policy import outcome, restart, stop
from kempner.supervisor.policy.outcome import Decision, RankExit
from kempner.supervisor.policy.restart import Failure
from kempner.supervisor.policy.stop import (
    AttemptLife,
    AttemptState,
    Deadline,
    StandingStop,
    StopOrder,
    Trigger,
)
from kempner.supervisor.slurm.job_monitor import LATE, WITHOUT_END
from kempner.supervisor.watchdog.board import JobBoard
from simulated.engine import Life, Process, Steps
from simulated.ranks import Ranks

if TYPE_CHECKING:
    from simulated.slurm import Job
    from simulated.world import World

ASK_EVERY = 10.0
"""Seconds between two questions to the controller."""

PROBE = 15.0
"""Seconds that a node gets to answer."""

T = TypeVar("T")
Asking: TypeAlias = Generator[float | None, None, T]
"""`Steps` that come to a result."""


class Daemon:
    """One supervisor of `job`. What it does is seen on the `board` by its watchdog."""

    def __init__(self, world: World, job: Job, board: JobBoard) -> None:
        self._world, self._job, self._board = world, job, board
        self.life, self._launch = Life(), job.restarts
        setting = world.setting
        self._allocation = Allocation(
            job=job.id,
            nodes=tuple(map(str, job.nodes[: setting.nodes])),
            tasks_per_node=setting.per_node,
            cpus_per_task=None,
            gpus_per_node=0,
            batch=True,
            spare=tuple(map(str, job.nodes[setting.nodes :])),
        )
        self.host = job.nodes[0]
        self.ranks: Ranks | None = None
        self._signalled = False
        self.main = Process(world.engine, self.life, self._live())

    def signal(self) -> None:
        """A stop signal has come."""
        self._signalled = self._warned = True
        self._ask_slurm()
        grace, left = self._world.config.supervise.stop_grace, self._seconds_left()
        within = grace if left is None else min(grace, max(0.0, left))
        self._ask_to_stop(StopOrder(StopReason.SIGNAL, "SIGTERM", within))

    def _live(self) -> Steps:
        while True:
            earlier = restart.failures(self._world.history)
            self._world.oracle.began(self._job.id)
            self._begin()
            decision = yield from self._follow()
            if decision.code in restart.FAILURES and (
                not self.stop_reason
                or (decision.code in restart.GO_ON_LATER and self._may_come_back)
            ):
                decision, again = yield from self._restart_or_finish(decision, earlier)
                if again:
                    continue
            yield from self._part(decision)
            return

    def _restart_or_finish(
        self, decision: Decision, earlier: Sequence[Failure]
    ) -> Asking[tuple[Decision, bool]]:
        """Get ready to start again after a failure, or not; what ends the run here, if it does."""
        failure, oracle = self._failure(decision), self._world.oracle
        budget = self._world.config.supervise.max_restarts_without_progress
        verdict = restart.decide_restart(decision, failure, earlier, budget)
        self._world.record(AttemptFailed(**asdict(failure)))
        oracle.failed(self._job.id, failure.step, failure.raised, failure.node_lost)
        if self.stop_reason:
            later = restart.failed_as_it_stopped(decision, verdict)
            if later is not None:
                return later, False
        if not verdict.again:
            self._world.record(self._verdict(decision, failure))
            oracle.gave_up(self._job.id, decision)
            return decision, False
        if self._may_come_back and self._ends_within(RESTART_TAKES):
            return replace(decision, code=ExitCode.STOPPED), False
        gone = yield from self._wait_and_probe(verdict.pause)
        if self._is_asked_to_stop:
            return replace(decision, code=ExitCode.STOPPED), False
        left = without(self._allocation, gone)
        if len(left.nodes) < (self._world.setting.least or len(self._allocation.nodes)):
            return replace(decision, bad_nodes=gone), False
        self._allocation = left
        oracle.starting_again(self._job.id, set(gone) & set(left.nodes))
        return decision, True

    @property
    def _may_come_back(self) -> bool:
        return self._first is not None and self._first.may_requeue

    @property
    def _is_asked_to_stop(self) -> bool:
        """Whether, between two attempts, there is a reason to begin no other one."""
        return self._signalled or self._ends_within(0.0)

    def _wait_and_probe(self, pause: float) -> Asking[tuple[str, ...]]:
        """Ask who is there, after a pause: not at all, or no longer, once a stop is asked for."""
        ready = self._world.engine.now + pause
        while not self._is_asked_to_stop and (left := ready - self._world.engine.now) > 0:
            yield min(left, self._world.setting.looks)
        if self._is_asked_to_stop:
            return ()
        return (yield from self._probe())

    def _begin(self) -> None:
        """What `AttemptFollower` starts with; and the ranks."""
        world, now = self._world, self._awake()
        self._ends: dict[int, tuple[float, RankExit]] = {}
        self._stop: StandingStop | None = None
        section = world.config.supervise
        graces = {Deadline.STOP: section.stop_grace, Deadline.CRASH: section.crash_grace}
        graces |= {Deadline.EVIDENCE: 0.0, Deadline.ABANDON: 0.0}
        self._attempt_life = AttemptLife(graces, AttemptState.LAUNCHING, now)
        self._hang: Hang | None = None
        self._warned = self.foreseen = False
        past, self._began_at = world.history, now
        size = len(self._allocation.nodes) * world.setting.per_node
        unlike = () if past.last_step else (Phase.LOAD,)
        self._pace = PhaseStats(learned(past, size), unlike)
        self._hangs = HangDetector(world.config.resilience, 0.0)
        self._asked_at = -ASK_EVERY
        self._first: JobState | None = None
        self._seen: JobState | None = None
        self._job_ends: float | None = None
        self._durations = past.durations
        attempt = world.begin_attempt()
        fruitless = restart.requeues_without_progress(past, self._job.id, past.last_step)
        self._board.tell_attempt(attempt.number, fruitless, "")
        world.board = self._board
        self._job.agents |= set(map(int, self._allocation.nodes))
        hosts = [int(n) for n in self._allocation.nodes for _ in range(world.setting.per_node)]
        self.ranks = self._job.ranks = Ranks(world, attempt, hosts, self._hear)
        world.launched(self.ranks)

    def _follow(self) -> Asking[Decision]:
        ranks = self.ranks
        assert ranks is not None
        while len(self._ends) < ranks.size:
            self._enforce(ranks)
            yield self._world.setting.looks
        ranks.kill()
        if phase_durations := self._pace.learned():
            self._world.record(to_event(phase_durations, ranks.size))
        if self._hang is not None and not self.stop_reason:
            return Decision(ExitCode.HUNG, self._hang.sentence, self._hang.laggard)
        return outcome.decide_outcome(self._exits(), self.stop_reason)

    def _enforce(self, ranks: Ranks) -> None:
        now, began = self._awake(), self._began_at
        world, last_reports = self._world, ranks.last_reports()
        usual = self._pace.usual()
        seen = Snapshot.of(now - began, ranks.size, last_reports, world.engine.now, usual)
        self._pace.check(seen)
        hangs = self._hangs.check(seen)
        if world.engine.now - self._asked_at >= ASK_EVERY:
            self._ask_slurm()
        self._stop_for_job_end()
        for hang in hangs:
            if self._advance(Trigger.HANG_FOUND):
                self._hang = hang
                self._pace.note_false_hang(hang.phase, hang.still)
        if now > self._attempt_life.until:
            self._advance(Trigger.TIME_UP)
        if self._attempt_life.state is AttemptState.KILLING:
            ranks.kill()

    def _advance(self, trigger: Trigger, within: float = inf) -> bool:
        before, now = self._attempt_life, self._awake()
        self._attempt_life = before.after(trigger, now, within)
        return self._attempt_life.state is not before.state

    def _ask_slurm(self) -> None:
        self._asked_at = self._world.engine.now
        if (seen := self._world.slurm.show(self._job)) is not None:
            self._first = self._first or seen
            self._seen = seen
            end = seen.times.end
            left = None if end is None else end - self._world.engine.now
            self._job_ends = None if left is None else self._awake() + left
            if end is not None and not seen.running and seen.may_go_back:
                end += self._world.setting.kill_wait
            preempted = seen.times.preempt is not None  # Slurm requeues it itself
            self._board.tell_end(None if preempted else end, end)

    def _stop_for_job_end(self) -> None:
        if self._first is None or self._seen is None:
            return
        self._durations = self.ranks.saves.learned if self.ranks else self._durations
        lead, margin = self._lead_and_margin(self._seen)
        found = stop.decide_stop(
            self._first,
            self._seen,
            self._world.setting.kill_wait,
            left=self._seconds_left(),
            lead=lead,
            margin=margin,
            warned=self._warned,
        )
        if found is not None:
            self._ask_to_stop(found)

    def _lead_and_margin(self, job: JobState) -> tuple[float, float]:
        limit, gap = job.times.limit, self._pace.quantile(0.95)
        margin = stop.exit_margin((), limit)
        self._board.tell_margin(margin)
        return stop.stop_lead(self._durations, gap, limit, margin), margin

    def _seconds_left(self) -> float | None:
        """Until the end of a job that runs or is suspended; None without one, or if not known."""
        if self._job_ends is None or self._seen is None:
            return None
        if not (self._seen.running or self._seen.state == "SUSPENDED"):
            return None
        return self._job_ends - self._awake()

    def _ends_within(self, seconds: float) -> bool:
        """Whether a stop has to begin within `seconds` (fewer in a short job), or by now."""
        left = self._seconds_left()
        if left is None or self._seen is None:
            return False
        limit = self._seen.times.limit
        lead, _ = self._lead_and_margin(self._seen)
        return left <= lead + (
            seconds if limit is None else min(seconds, stop.MARGIN_SHARE * limit)
        )

    @property
    def stop_reason(self) -> StopReason:
        return StopReason.NONE if self._stop is None else self._stop.reason

    def _ask_to_stop(self, order: StopOrder) -> None:
        now = self._awake()
        standing = stop.renew(self._stop, order, now)
        if standing is None:
            return
        self._advance(Trigger.STOP_REQUESTED, standing.by - now)
        self._stop, self.foreseen = standing, standing.reason is StopReason.DEADLINE
        if self.ranks is not None:
            self.ranks.ask(standing.by - now)

    def _exits(self) -> list[RankExit]:
        """In the order of their first signs."""
        return [end for _, end in sorted(self._ends.values(), key=itemgetter(0))]

    def _hear(self, ranks: Ranks, end: RankExit, sign: float) -> None:
        if ranks is not self.ranks or not self.life.alive or end.rank in self._ends:
            return
        first_to_fail = outcome.failed(end) and not any(map(outcome.failed, self._exits()))
        self._ends[end.rank] = sign, end
        if first_to_fail:
            self._advance(Trigger.RANK_FAILED)
            self._world.engine.call(1.0, lambda: ranks.peers_leave(told=True))
        if end.status == ExitCode.STOPPED and self._stop is None:
            grace = self._world.config.supervise.stop_grace
            self._ask_to_stop(StopOrder(StopReason.PEER_STOPPED, "a rank was asked", grace))
        self.main.wake()

    def _failure(self, decision: Decision) -> Failure:
        assert self.ranks is not None
        culprit = next((end for end in self._exits() if end.rank == decision.culprit), None)
        return Failure(
            step=self.ranks.train_state.step,
            committed=self._world.history.last_step,
            raised=culprit.raised if culprit is not None else "",
            node_lost=decision.environment or (culprit is not None and outcome.is_lost(culprit)),
            code=int(decision.code),
        )

    def _verdict(self, decision: Decision, failure: Failure) -> RunGivenUp:
        return RunGivenUp(
            code=int(decision.code),
            reason=decision.reason,
            step=failure.step,
            node="",
            raised=failure.raised,
            see=(),
            advice="",
        )

    def _probe(self) -> Asking[tuple[str, ...]]:
        """Ask the hosts of ranks that are gone without a word whether they are there."""
        assert self.ranks is not None
        lost = {e.rank for e in self._exits() if e.status is None and not e.ended_by_us}
        hosts = sorted({self.ranks.hosts[rank] for rank in lost})
        gone = tuple(str(host) for host in hosts if not self._world.slurm.up[host])
        yield 1.0 + PROBE * len(gone)
        return gone

    def _part(self, decision: Decision) -> Steps:
        world, job = self._world, self._job
        if decision.code not in restart.RESUMES_ELSEWHERE and not decision.bad_nodes:
            self._board.settle()
        if stuck := world.take_sticking():
            world.stick(job, stuck)
            yield 0.0
        state = yield from self._job_at_last(decision)
        step = world.history.last_step
        fruitless = restart.requeues_without_progress(world.history, job.id, step)
        parting = restart.decide_requeue(decision, self._first, state, True, fruitless)
        refusal = ""
        if parting.requeue:
            preempted = state is not None and state.times.preempt is not None
            refusal = world.slurm.requeue(job, self._launch, tuple(map(int, decision.bad_nodes)))
            if not refusal:
                world.record(Requeued(step, job.id, preempted=preempted))
        else:
            world.oracle.parted(job.id, decision, state)
            if self.ranks is not None and self.ranks.attempt.number != world.oracle.current:
                world.oracle.superseded(job.id)
        self._board.settle()
        if refusal:
            world.record(NotRequeued(step, refusal))
        if decision.code is ExitCode.COMPLETED:
            world.oracle.completed(world.setting.max_steps)
            world.complete = True
        self.life.end()
        if job.batch is not None:
            job.batch.supervisor_left()

    def _job_at_last(self, decision: Decision) -> Asking[JobState | None]:
        """What Slurm says of the job, asked until it is too late if the job is to go on."""
        left, failures = self._seconds_left(), 0
        until = self._world.engine.now + (WITHOUT_END if left is None else left + LATE)
        goes_on = decision.code in restart.RESUMES_ELSEWHERE or decision.bad_nodes
        while (state := self._world.slurm.show(self._job)) is None and goes_on:
            failures += 1
            if self._world.engine.now + next_pause(failures) > until:
                break
            yield next_pause(failures)
        return state

    def _awake(self) -> float:
        """The clock that stands still while suspended."""
        return self._world.engine.now - self._job.asleep
