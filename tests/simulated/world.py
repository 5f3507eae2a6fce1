"""A run, its cluster and its faults, from the first submission to the last commit."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from kempner.cluster.slurm.command import LONGEST_PAUSE
from kempner.config.sections import (
    CheckpointSection,
    Config,
    ResilienceSection,
    SuperviseSection,
    TrainSection,
)
from kempner.run.record.events import LedgerEvent, Requeued
from kempner.run.record.history import RunHistory
from kempner.training.rank_link import rank_link
from simulated import strikes
from simulated.checks.oracle import Invariant, Oracle, Violation
from simulated.daemon import Daemon
from simulated.faults import Fault, Kind, Schedule, Setting
from simulated.ranks import Ranks
from simulated.slurm import Job, Slurm
from simulated.storage import Storage

PATROL = 4000.0
"""Seconds after which a person ends a job without a supervisor. Its ranks have left by then."""

PERSON = 60.0
"""Seconds until a person starts a run again that has stopped."""

_IMPAIRING = frozenset(Kind) - {
    Kind.PREEMPT, Kind.WARNING, Kind.TOLD, Kind.REFUSE, Kind.DAMAGE, Kind.SECOND,
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
        return Outcome(
            violation, self.engine.events, self.struck, self.oracle.current, self.engine.now
        )

    def _deadline(self, last: float) -> float:
        setting = self.setting
        whole = setting.max_steps * setting.step * 2 + setting.max_steps / setting.interval * (
            setting.stage + setting.write
        )
        return last + 20_000.0 + 3 * whole

    # What the others ask for

    def record(self, event: LedgerEvent) -> None:
        """A line in the ledger, and read again."""
        self.history.add([{"event": event.name, **event.to_fields()}])

    def run_batch(self, job: Job) -> None:
        """Slurm starts the batch script."""
        job.daemon = Daemon(self, job)

    def launched(self, ranks: Ranks) -> None:
        """Ranks were started: those on a node that is gone end at once."""
        for node in set(ranks.hosts):
            if not self.slurm.up[node]:
                ranks.lose_node(node, loud=True)

    def slowness(self) -> float:
        """By how much a step takes longer."""
        return self.slow_by if self.engine.now < self.slow_until else 1.0

    def asleep(self, ranks: Ranks) -> float:
        """The seconds for which Slurm has suspended the job of `ranks`."""
        return next((job.asleep for job in self.slurm.jobs if job.ranks is ranks), 0.0)

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
        job = next((job for job in self.slurm.jobs if job.ranks is ranks), None)
        if job is None or job.daemon is not None or ranks.attempt.number in self._claimed:
            return
        self._claimed.add(ranks.attempt.number)
        noticed = job.bereaved_at + self.config.supervise.supervisor_timeout
        wait = max(rank_link.TURN, noticed - self.engine.now)
        self.engine.call(wait, lambda: self._hand_back(job, ranks))

    def abandoned(self, ranks: Ranks, steps: int) -> None:
        """The ranks leave without the last steps."""
        job = next((job for job in self.slurm.jobs if job.ranks is ranks), None)
        if job is None or job.daemon is None or not job.daemon.foreseen or job.shortened:
            return
        setting = self.setting
        if setting.stage + setting.write >= setting.interval * setting.step:
            return  # one save waits for the other, and the last one for both
        if job.state == "RUNNING" and job.preempt_time is None and not self._impaired:
            self.oracle.lost_at_limit(steps)

    @property
    def _impaired(self) -> bool:
        return self.engine.now < self._impaired_until

    def _hand_back(self, job: Job, ranks: Ranks) -> None:
        if job.ranks is not ranks:
            return
        if (state := self.slurm.show(job)) is None:
            self.engine.call(LONGEST_PAUSE, lambda: self._hand_back(job, ranks))
            return
        if rank_link.decide_orphan_requeue(state, state.restarts, superseded=False).requeue:
            if not self.slurm.requeue(job):
                self.record(Requeued(self.history.last_step, job.id))
        elif state.state == "RUNNING" and state.may_requeue:
            raise Violation(Invariant.UNFINISHED, "the ranks leave a job without a supervisor")

    def bereave(self, job: Job) -> None:
        """The supervisor is gone, and nobody has told Slurm: the ranks hear nothing any more."""
        job.life.end()
        job.daemon, job.bereaved_at = None, self.engine.now
        if (ranks := job.ranks) is not None:
            self.engine.call(self.config.supervise.supervisor_timeout, lambda: ranks.ask(None))
        self.engine.call(PATROL, lambda: self._look_after(job, job.restarts))

    def _look_after(self, job: Job, launch: int) -> None:
        if job.restarts == launch and job.daemon is None and not job.over:
            self.slurm.give_up(job)

    def job_over(self, job: Job) -> None:
        """A job will not come back. If that was the run's last one, a person may have to act."""
        if any(not other.over for other in self.slurm.jobs) or self.complete:
            return
        known = ""
        if job.cancelled or not job.may_requeue or job.shortened:
            known = "cancelled, not to be requeued, or cut short"
        elif job.end_state == "FAILED":
            known = "the supervisor was killed"
        elif job.end_state == "TIMEOUT" and self._impaired:
            known = "the ranks could not stop in time"
        self.oracle.needs_person(known)
        self.crash_at = None
        self.engine.call(PERSON, self._submit)

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
