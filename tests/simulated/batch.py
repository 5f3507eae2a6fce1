"""The batch process of a simulated job: a keeper, the supervisor, and the watchdog between them.

The watchdog is the real one, with all that it decides; what is modelled is when it hears of what.
"""

from __future__ import annotations

import signal
from typing import TYPE_CHECKING

from kempner.cluster.slurm.command import SlurmRefusedError, SlurmSilentError
from kempner.cluster.slurm.job import JobState
from kempner.cluster.slurm.scontrol import SlurmAccess
from kempner.supervisor.watchdog.board import JobBoard, SupervisorStage, WatchdogVerdict
from kempner.supervisor.watchdog.keeper import WAKES_EVERY
from kempner.supervisor.watchdog.watch import (
    ASK_EVERY,
    LOOK_EVERY,
    Act,
    JobLaunch,
    Watchdog,
    WatchMeans,
    next_act,
)
from simulated.daemon import Daemon
from simulated.engine import Life, Process, Steps

if TYPE_CHECKING:
    from simulated.slurm import Job
    from simulated.world import World

KILLED, LEFT = int(signal.SIGKILL), 0
"""Statuses of wait(2)."""


class _Pause(Exception):
    """The watchdog waits for a number of seconds before it asks Slurm again."""


class Batch:
    """The processes of one launch of `job`. Its own life is the keeper's."""

    def __init__(self, world: World, job: Job) -> None:
        self._world, self._job, self._launch = world, job, job.restarts
        self.life, self.board = job.life, JobBoard(alone=True)
        self.daemon = Daemon(world, job, self.board)
        self._starts = 0
        self._watch()

    def supervisor_left(self, status: int = LEFT) -> None:
        """The keeper sees that the supervisor has ended."""
        self.board.tell_status(status)
        self._leave_if_done()

    def kill_watchdog(self) -> None:
        """The keeper starts another one, after a pause that grows."""
        self.watchdog_life.end()
        pause = WAKES_EVERY * 2.0**self._starts
        self._world.engine.call(pause, lambda: self._watch() if self.life.alive else None)

    def stop_watchdog(self) -> None:
        """The keeper wakes it."""
        self.watchdog_life.freeze()
        self._world.engine.call(WAKES_EVERY, self.watchdog_life.thaw)

    def end(self) -> None:
        """All of it is gone."""
        for life in (self.life, self.daemon.life, self.watchdog_life):
            life.end()

    def _watch(self) -> None:
        self._starts += 1
        self.watchdog_life = Life()
        Process(self._world.engine, self.watchdog_life, self._live())

    def _live(self) -> Steps:
        means = WatchMeans(
            SlurmAccess(self._look, self._requeue, self._now, self._wait),
            lambda number: self._ranks(),
            lambda job: self._ends_at(job),
            lambda job: self._stop_ranks(),
            self._now,
            lambda seconds: None,
        )
        watchdog = Watchdog(self.board, JobLaunch(self._job.id, self._job.id, self._launch), means)
        while True:
            act = next_act(watchdog.sight())
            try:
                if watchdog.do(act):
                    break
            except _Pause as pause:
                yield pause.args[0]
            else:
                yield LOOK_EVERY if self.board.status is None else ASK_EVERY
        if self.board.verdict is WatchdogVerdict.LEFT:
            self._world.oracle.left_alone(self._job.id)
        self._leave_if_done()

    def _leave_if_done(self) -> None:
        settled = self.board.stage is SupervisorStage.SETTLED
        idle = self.board.verdict is not WatchdogVerdict.NONE
        if self.board.status is None or not self.life.alive:
            return
        sight = Watchdog(self.board, JobLaunch("", "", 0), WatchMeans(clock=self._now)).sight()
        if settled or idle or next_act(sight) is Act.REST:
            self.end()
            self._world.slurm.batch_over(self._job)

    # What it asks of Slurm

    def _now(self) -> float:
        return self._world.engine.now

    def _wait(self, seconds: float) -> None:
        raise _Pause(seconds)

    def _look(self, _: str) -> JobState:
        if (state := self._world.slurm.show(self._job)) is None:
            raise SlurmSilentError("no answer")
        return state

    def _requeue(self, _: str) -> None:
        if self.board.status is None and not self.daemon.life.frozen:
            self._world.needed(self._job)
        if refusal := self._world.slurm.requeue(self._job, self._launch):
            raise SlurmRefusedError("scontrol requeue", refusal)

    def _ranks(self) -> bool:
        self._look("")
        return self._job.ranks is not None and not self._job.ranks.over

    def _stop_ranks(self) -> None:
        self._look("")
        if self._job.ranks is not None:
            self._job.ranks.signal()

    def _ends_at(self, job: JobState) -> float | None:
        return job.times.end
