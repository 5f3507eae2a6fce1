"""A run, its cluster and its faults, from the first submission to the last commit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, partial

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import LONGEST_PAUSE
from kempner.config.sections import (
    CheckpointSection,
    Config,
    ResilienceSection,
    SuperviseSection,
    TrainSection,
)
from kempner.run.record.events import CheckpointCommitted, LedgerEvent, Requeued
from kempner.run.record.history import RunHistory
from kempner.supervisor.launchers.agents import last_resort
from kempner.supervisor.launchers.agents.node_agent import ALONE
from kempner.supervisor.policy import restart
from kempner.supervisor.watchdog.board import JobBoard
from kempner.supervisor.watchdog.watch import LOOK_EVERY
from kempner.training.rank_link import rank_link
from simulated import strikes
from simulated.batch import KILLED, Batch
from simulated.checks.oracle import Invariant, Oracle, Violation
from simulated.crew import SILENT_AFTER
from simulated.faults import Fault, Kind, Schedule, Setting
from simulated.ranks import Ranks
from simulated.slurm import Job, Slurm
from simulated.storage import Storage

PATROL = 4000.0
"""Seconds after which a person ends a job without a supervisor. Its ranks have left by then."""

PERSON = 60.0
"""Seconds until a person starts a run again that has stopped."""

UNHEARD = 60.0
"""Seconds that a requeue may take once Slurm can be asked again."""

_IMPAIRING = frozenset(Kind) - {
    Kind.WATCHDOG, Kind.PREEMPT, Kind.WARNING, Kind.TOLD, Kind.REFUSE, Kind.DAMAGE, Kind.SECOND,
    Kind.SECOND_IN_COMMIT, Kind.CANCEL, Kind.OPERATOR,
}  # fmt: skip
"""Faults after which the ranks may not be able to stop in time."""

_IMPAIRED_FOR = 2500.0
"""Seconds for which they may not: no hang goes unnoticed for longer."""


@dataclass(frozen=True)
class Outcome:
    """How a schedule went. `violation` is None if all was well."""

    violation: Violation | None
    events: int
    struck: int
    attempts: int
    seconds: float
    excused: Mapping[str, int]
    """How often a person had to start the run again, by the reasons that the model knows of."""


class World(Storage):
    """All that there is."""

    def __init__(self, schedule: Schedule) -> None:
        self.setting, self._schedule = schedule.setting, schedule
        self.config = _configure(schedule.setting)
        rollbacks = self.config.resilience.max_rollbacks
        super().__init__(Oracle(self.setting.budget, self.setting.keep_last, rollbacks))
        self.history = RunHistory()
        self.mute_until = self.refuse_until = self.slow_until = 0.0
        self.slurm = Slurm(self)
        self.complete = False
        self.struck = 0
        self.slow_by = 1.0
        self._traps: dict[str, Fault] = {}
        self.crash_at: tuple[int, Fault] | None = None
        self.bad_steps: dict[int, float] = {}
        self.bad_samples: dict[int, float] = {}
        self._claimed: set[int] = set()
        self.sticks_for = 0.0
        self.board = JobBoard(alone=True)
        self._impaired_until = 0.0

    def live(self) -> Outcome:
        """Let it all happen."""
        faults = self._schedule.faults
        for fault in faults:
            self.engine.call(fault.at, lambda fault=fault: self._happen(fault))
        last = max((fault.at for fault in faults), default=0.0)
        self.engine.call(last + strikes.SLOW_FOR, self._mend)
        self.slurm.submit()
        violation = None
        try:
            self.engine.run(self._deadline(last), lambda: self.complete)
            if not self.complete and not self.setting.hopeless:
                self.oracle.never_completed(self.oracle.branch[-1] if self.oracle.branch else 0)
        except Violation as found:
            violation = found
        attempts, excused = self.oracle.current, self.oracle.excused
        events, seconds = self.engine.events, self.engine.now
        return Outcome(violation, events, self.struck, attempts, seconds, excused)

    def _deadline(self, last: float) -> float:
        setting = self.setting
        if setting.hopeless:
            return last  # it would be put back, and started again by a person, for ever
        whole = setting.max_steps * setting.step * 2 + setting.max_steps / setting.interval * (
            setting.stage + setting.write
        )
        return last + 20_000.0 + 3 * whole

    # What the others ask for

    def record(self, event: LedgerEvent) -> None:
        """A line in the ledger, and read again."""
        if isinstance(event, CheckpointCommitted):
            self.board.tell_step(event.step, new=True)
        self.history.add([{"event": event.name, **event.to_fields()}])

    def run_batch(self, job: Job) -> None:
        """Slurm starts the batch script."""
        self.oracle.launched(job.id)
        job.batch = Batch(self, job)
        job.daemon = job.batch.daemon

    def launched(self, ranks: Ranks) -> None:
        """Ranks were started: those on a node that is gone end at once."""
        for node in set(ranks.hosts):
            if not self.slurm.up[node]:
                ranks.lose_node(node, loud=True)

    def slowness(self) -> float:
        """By how much a step takes longer."""
        return self.slow_by if self.engine.now < self.slow_until else 1.0

    def job_of(self, ranks: Ranks) -> Job | None:
        """The job in whose newest attempt `ranks` are."""
        return next((job for job in self.slurm.jobs if job.ranks is ranks), None)

    def asleep(self, ranks: Ranks) -> float:
        """The seconds for which Slurm has suspended the job of `ranks`."""
        return 0.0 if (job := self.job_of(ranks)) is None else job.asleep

    def loss(self, step: int, cursor: int) -> float:
        """The loss of a step on the samples at `cursor`."""
        if step in self.bad_steps:
            return self.bad_steps.pop(step)
        return self.bad_samples.get(cursor) or 2.0 + (cursor * 7919 % 101) / 1000

    def stepped(self, ranks: Ranks) -> None:
        """A step was made; some are deadly."""
        if self.crash_at is None or ranks.train_state.step < self.crash_at[0]:
            return
        fault = self.crash_at[1]
        rank = fault.who % ranks.size
        if ranks.train_state.step == self.crash_at[0] and fault.kind is Kind.CRASH:
            ranks.crash(rank, "ValueError: no such thing")
        elif ranks.train_state.step == self.crash_at[0]:
            ranks.die(rank)

    def take_trap(self, phase: str) -> Fault | None:
        """The fault that waits for this phase."""
        return self._traps.pop(phase, None) if self._traps else None

    def left(self, ranks: Ranks, rank: int) -> None:
        """A rank has left to be resumed. Where its supervisor is gone, it sees to that itself."""
        job = self.job_of(ranks)
        if job is None or not self._is_alone(job) or ranks.attempt.number in self._claimed:
            return
        self._claimed.add(ranks.attempt.number)
        noticed = job.bereaved_at + self.config.supervise.supervisor_timeout
        wait = max(rank_link.TURN, noticed - self.engine.now)
        launch = job.restarts
        self.engine.call(wait, lambda: self._hand_back(job, ranks, launch))

    def _is_alone(self, job: Job) -> bool:
        """Whether ranks have lost their supervisor, or hear nothing of it for too long."""
        if job.daemon is None:
            return True
        silent = self.engine.now - job.bereaved_at >= self.config.supervise.supervisor_timeout
        return job.daemon.life.frozen and silent

    def abandoned(self, ranks: Ranks, steps: int) -> None:
        """The ranks leave without the last steps."""
        job = self.job_of(ranks)
        if job is None or job.daemon is None or not job.daemon.foreseen or job.shortened:
            return
        setting = self.setting
        if setting.stage + setting.write >= setting.interval * setting.step:
            return  # one save waits for the other, and the last one for both
        if job.state == "RUNNING" and job.preempt_time is None and not self._impaired:
            self.oracle.lost_at_limit(steps)

    def needed(self, job: Job) -> None:
        """The watchdog puts a job back whose supervisor works."""
        unheard = (
            max(self.mute_until, self.refuse_until, job.no_room_until) > self.engine.now - UNHEARD
        )
        if not (self._impaired or unheard or job.shortened):
            raise Violation(
                Invariant.UNFINISHED, "the supervisor is too late, and its watchdog not"
            )

    @property
    def _impaired(self) -> bool:
        return self.engine.now < self._impaired_until

    def _hand_back(self, job: Job, ranks: Ranks, launch: int) -> None:
        if job.ranks is not ranks:
            return
        if (state := self.slurm.show(job, elsewhere=True)) is None:
            self.engine.call(LONGEST_PAUSE, lambda: self._hand_back(job, ranks, launch))
            return
        if scontrol.decide_orphan_requeue(state, launch, superseded=False).requeue:
            if not self.slurm.requeue(job, launch):
                self.record(Requeued(self.history.last_step, job.id))
        elif state.may_go_back and state.may_requeue and state.restarts == launch:
            raise Violation(Invariant.UNFINISHED, "the ranks leave a job without a supervisor")

    def lose_supervisor(self, job: Job) -> None:
        """Its process is killed: the keeper sees that at once, the ranks hear nothing any more."""
        assert job.batch is not None
        job.batch.daemon.life.end()
        job.daemon, job.bereaved_at = None, self.engine.now
        self._silence(job, lambda: job.daemon is None)
        job.batch.supervisor_left(KILLED)

    def stick(self, job: Job, seconds: float) -> None:
        """The supervisor does not go on for so long."""
        if (daemon := job.daemon) is None:
            return
        daemon.life.freeze()
        job.bereaved_at = self.engine.now
        self._silence(job, lambda: daemon.life.frozen)
        self.engine.call(seconds, daemon.life.thaw)

    def take_sticking(self) -> float:
        """For how long a supervisor is stuck before it asks for the requeue."""
        seconds, self.sticks_for = self.sticks_for, 0.0
        return seconds

    def _silence(self, job: Job, still: Callable[[], bool]) -> None:
        """The ranks stop once they have heard nothing for long, and leave a collective that does
        not end."""
        if (ranks := job.ranks) is None:
            return
        ask = lambda: ranks.ask(None) if still() else None  # noqa: E731
        leave = lambda: ranks.peers_leave(told=True) if still() else None  # noqa: E731
        silent = self.config.supervise.supervisor_timeout
        self.engine.call(silent, ask)
        self.engine.call(2 * silent + 10 * self.setting.step, leave)

    def bereave(self, job: Job) -> None:
        """The batch host is gone, and Slurm has not been told: the ranks hear nothing any more."""
        if job.batch is not None:
            job.batch.end()
        job.batch = job.daemon = None
        job.bereaved_at = self.engine.now
        self._silence(job, lambda: True)
        self.tell_agents(job, SILENT_AFTER + ALONE, ending=False)
        self.engine.call(PATROL, lambda: self._look_after(job, job.restarts))

    def tell_agents(self, job: Job, after: float, ending: bool) -> None:
        """The agents of the newest attempt have no supervisor any more."""
        if (ranks := job.ranks) is None:
            return
        launch = job.restarts
        for task, node in enumerate(sorted(job.agents)[: last_resort.ASKING]):
            see = partial(self._see_to_it, job, ranks, node, launch, ending)
            self.engine.call(after + task * last_resort.TURN, see)

    def _see_to_it(self, job: Job, ranks: Ranks, node: int, launch: int, ending: bool) -> None:
        """What the agent of a node does, which dies with it, and as Slurm kills the job's steps."""
        if job.restarts != launch or job.over or node in job.lost:
            return
        here = [rank for rank in range(ranks.size) if ranks.hosts[rank] == node]
        again = partial(self._see_to_it, job, ranks, node, launch, ending)
        if not ending and not ranks.gone.issuperset(here):
            self.engine.call(last_resort.TURN, again)
            return
        if (state := self.slurm.show(job, elsewhere=node != job.batch_host)) is None:
            self.engine.call(LONGEST_PAUSE, again)
            return
        step = self.history.last_step
        back = restart.requeues_without_progress(self.history, job.id, step)
        fruitless = back >= restart.MAX_REQUEUES_WITHOUT_PROGRESS
        if last_resort.decide_last_resort(state, launch, False, fruitless, ending).requeue:
            if not self.slurm.requeue(job, launch):
                self.record(Requeued(step, job.id))
        elif fruitless:
            self.oracle.left_alone(job.id)

    def _look_after(self, job: Job, launch: int) -> None:
        if job.restarts == launch and job.daemon is None and not job.over:
            self.slurm.give_up(job)

    def job_over(self, job: Job) -> None:
        """A job will not come back. If that was the run's last one, a person may have to act."""
        if any(not other.over for other in self.slurm.jobs) or self.complete:
            return
        self.oracle.needs_person(job.id, _meant(job) or self._why_stranded(job))
        self.crash_at = None
        self.engine.call(PERSON, self._submit)

    def _why_stranded(self, job: Job) -> str:
        """What nothing of kempner's can help: only then a job that was not cancelled ends.

        A process asks for the requeue until Slurm kills it, KillWait after the end: between its
        last question and that lies one pause, and a look of the watchdog's at what the supervisor
        has heard."""
        last = LONGEST_PAUSE + 2 * LOOK_EVERY
        if self.engine.now - self.mute_until < last:
            return "Slurm gave no answer until it had ended the job"
        elsewhere = job.bereaved_at and job.agents != {job.batch_host}
        if self.engine.now - job.no_room_until < last and not elsewhere:
            return "no process could be made on the batch host until Slurm had ended the job"
        if job.agents <= job.lost:
            return "all nodes with a process of kempner's were lost"
        return ""

    def _submit(self) -> None:
        if all(job.over for job in self.slurm.jobs):
            self.slurm.submit()

    # Faults

    def _happen(self, fault: Fault) -> None:
        """A fault of the schedule."""
        if self.complete:
            return
        if fault.phase:
            self._traps[fault.phase] = fault
            return
        job = next((job for job in self.slurm.jobs if not job.over), None)
        if job is not None and strikes.maybe_inject(self, job, fault):
            self.struck_by(fault)

    def start_second(self) -> None:
        """A person starts the run again while it runs."""
        self.slurm.submit()

    def struck_by(self, fault: Fault) -> None:
        """Take note of a fault that has happened."""
        self.struck += 1
        if fault.kind in _IMPAIRING:
            self._impaired_until = self.engine.now + _IMPAIRED_FOR

    def maybe_inject(self, ranks: Ranks, fault: Fault) -> None:
        """A fault that has waited for its phase."""
        rank = fault.who % ranks.size
        self.struck_by(fault)
        if fault.kind is Kind.HANG:
            ranks.hang(rank)
        else:
            ranks.die(rank)

    def _mend(self) -> None:
        self._traps.clear()
        self.crash_at = None
        self.bad_samples.clear()


def _meant(job: Job) -> str:
    """What a person has decided about a job, if that is why it ends."""
    if job.cancelled:
        return "it was cancelled"
    if not job.may_requeue:
        return "it may not be requeued"
    return ""


@cache
def _configure(setting: Setting) -> Config:
    return Config(
        train=TrainSection(max_steps=setting.max_steps),
        checkpoint=CheckpointSection(interval=setting.interval, keep_last=setting.keep_last),
        resilience=ResilienceSection(spike_window=16),
        supervise=SuperviseSection(
            max_restarts_without_progress=setting.budget,
            min_nodes=setting.least,
            spare_nodes=setting.spare,
        ),
    )


def simulate(schedule: Schedule) -> Outcome:
    """Run a schedule; `files.in_memory` must be open."""
    return World(schedule).live()
