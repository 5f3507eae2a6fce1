"""A model of Slurm 22.05 as it was seen to behave: limits, preemption, requeues, lost nodes.

Two of its habits are traps, and modelled as such: to requeue a job that was cancelled and still
completes brings it back to life; and a node that is lost to Slurm may go on computing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kempner.cluster.slurm.job import JobNodes, JobState, JobTimes
from kempner.supervisor.launchers.agents.node_agent import ALONE_AT_A_STOP
from simulated.engine import Life

if TYPE_CHECKING:
    from simulated.batch import Batch
    from simulated.daemon import Daemon
    from simulated.ranks import Ranks
    from simulated.world import World

NODE_TIMEOUT = 78.0
"""Seconds until Slurm notices that a node is gone (SlurmdTimeout and its looks)."""

REPAIR = 600.0
"""Seconds until a lost node is back."""

TICK = 10.0
"""Seconds by which the end of a preemption's grace time is late."""


class Job:
    """A job. `life` is that of its batch process, the keeper of `batch`; `ranks` is what its last
    step started. The `daemon` is its supervisor, while there is one."""

    def __init__(self, id_: str, may_requeue: bool, time_limit: float | None) -> None:
        self.id, self.may_requeue, self.time_limit = id_, may_requeue, time_limit
        self.state, self.reason, self.restarts = "PENDING", "", 0
        self.end_time: float | None = None
        self.preempt_time: float | None = None
        self.nodes: list[int] = []
        self.excluded: set[int] = set()
        self.batch_host = 0
        self.life = Life()
        self.batch: Batch | None = None
        self.daemon: Daemon | None = None
        self.ranks: Ranks | None = None
        self.cancelled = False
        self.end_state = ""
        """What it will be once it has completed."""
        self.again = False
        """Whether it goes back into the queue once it has completed."""
        self.shortened = False
        """Whether an administrator has cut its time."""
        self.bereaved_at = 0.0
        """When its supervisor was lost without a word to Slurm."""
        self.agents: set[int] = set()
        """Nodes of which an agent was told of ranks in this launch."""
        self.lost: set[int] = set()
        """Nodes that this launch has lost."""
        self.no_room_until = 0.0
        """Until when no process can be made on its batch host."""
        self.suspended_at: float | None = None
        self.asleep = 0.0
        """Seconds for which it was suspended."""

    @property
    def over(self) -> bool:
        """Whether it will never run again."""
        return self.state in ("COMPLETED", "TIMEOUT", "CANCELLED", "FAILED")


class Slurm:
    """The controller: jobs, and which nodes are up."""

    def __init__(self, world: World) -> None:
        self._world, self._engine = world, world.engine
        self.up = [True] * world.setting.pool
        self.jobs: list[Job] = []

    def submit(self) -> Job:
        """sbatch of the run's script."""
        setting = self._world.setting
        job = Job(str(len(self.jobs) + 1), setting.may_requeue, setting.time_limit)
        self.jobs.append(job)
        self._engine.call(1.0, lambda: self._start(job, 0))
        return job

    def show(self, job: Job, elsewhere: bool = False) -> JobState | None:
        """scontrol show job; None if the controller does not answer, or if it cannot be asked: on
        the batch host, or `elsewhere`."""
        if self._engine.now < self._world.mute_until:
            return None
        if self._engine.now < job.no_room_until and not elsewhere:
            return None
        times = JobTimes(job.end_time, job.preempt_time, job.time_limit)
        return JobState(
            job.id, job.state, job.reason, job.restarts, job.may_requeue, True, times, JobNodes()
        )

    def requeue(self, job: Job, launch: int, without: tuple[int, ...] = ()) -> str:
        """scontrol requeue, by a process of one `launch` of a job; why not, empty if it was."""
        if not job.may_requeue or job.over:
            return "Requested operation is presently disabled"
        if job.state == "PENDING":
            return "Job is pending execution"
        if job.restarts != launch:
            self._world.oracle.requeued_again(job.id)
        now = self._engine.now
        if now < self._world.refuse_until or now < self._world.mute_until:
            self._world.oracle.refused(job.id)
            return "Access/permission denied"
        self._world.oracle.requeued(job.id, job.cancelled, job.preempt_time is not None)
        job.excluded |= set(without)
        self._put_back(job)
        return ""

    def put_back(self, job: Job) -> None:
        """scontrol requeue, by an operator; or what follows a preemption or a lost node."""
        if job.state == "RUNNING" and job.may_requeue:
            self._put_back(job)
        elif job.state == "RUNNING":
            self._end(job, again=False)

    def cancel(self, job: Job) -> None:
        """scancel, which is refused once Slurm ends the job by itself."""
        if job.state == "COMPLETING" and not job.again and not job.cancelled and job.reason:
            return
        job.cancelled = True
        if job.state == "PENDING":
            job.state = "CANCELLED"
            self._world.job_over(job)
        elif not job.over:
            job.again = False
            self._end(job, again=False)

    def preempt(self, job: Job, grace: float) -> None:
        """A job of higher priority needs the nodes: the tasks are signalled, then all ends."""
        if job.state != "RUNNING" or job.preempt_time is not None:
            return
        job.preempt_time = self._engine.now
        job.end_time = self._engine.now + grace
        if job.ranks is not None:
            job.ranks.signal()
        self._later(grace + TICK if grace else 0.0, job, self.put_back)

    def shorten(self, job: Job, left: float) -> None:
        """An administrator has moved the job's end."""
        if job.state == "RUNNING" and job.preempt_time is None:
            job.end_time = min(job.end_time or 1e9, self._engine.now + left)
            job.shortened = True
            self._later(left, job, self._look_at_limit)

    def suspend(self, job: Job, seconds: float) -> None:
        """scontrol suspend, and later resume."""
        if job.state != "RUNNING":
            return
        job.state, job.suspended_at = "SUSPENDED", self._engine.now
        for life in self._lives(job):
            life.freeze()
        self._later(seconds, job, self._resume)

    def lose(self, node: int) -> None:
        """A node is lost to Slurm, which notices late."""
        if not self.up[node]:
            return
        self.up[node] = False
        self._engine.call(REPAIR, lambda: self._repair(node))
        for job in self.jobs:
            if node in job.nodes and not job.over:
                job.lost.add(node)
                self._later(NODE_TIMEOUT, job, lambda job: self._node_down(job, node))

    def batch_over(self, job: Job) -> None:
        """The batch process has ended, which ends the job."""
        job.daemon = job.batch = None
        if job.state in ("RUNNING", "SUSPENDED"):
            job.reason, job.again = "", False
            self._finish(job, "COMPLETED")
        elif job.state == "COMPLETING":
            self._kill(job)

    def give_up(self, job: Job) -> None:
        """A person ends a job in which nothing is left."""
        self._end(job, again=False, why="FAILED")

    def batch_killed(self, job: Job) -> None:
        """The batch process was killed: the tasks are signalled, and the job ends."""
        if job.state == "RUNNING":
            self._end(job, again=False, reason="JobLaunchFailure", why="FAILED")

    def _start(self, job: Job, restarts: int) -> None:
        if job.state != "PENDING" or job.restarts != restarts:
            return
        wanted = self._world.setting.nodes + self._world.setting.spare
        taken = {node for other in self.jobs if not other.over for node in other.nodes}
        free = [n for n, up in enumerate(self.up) if up and n not in job.excluded | taken]
        if len(free) < wanted:
            self._engine.call(30.0, lambda: self._start(job, restarts))
            return
        now = self._engine.now
        job.nodes, job.state, job.reason = free[:wanted], "RUNNING", ""
        job.batch_host = job.nodes[0]
        job.preempt_time, job.shortened, job.asleep, job.suspended_at = None, False, 0.0, None
        job.end_time = None if job.time_limit is None else now + job.time_limit
        job.life, job.no_room_until = Life(), 0.0
        job.agents, job.lost, job.bereaved_at = set(), set(), 0.0
        self._world.run_batch(job)
        if job.time_limit is not None:
            self._later(job.time_limit, job, self._look_at_limit)
            if (before := self._world.setting.warn_before) is not None:
                self._later(job.time_limit - before, job, self._warn)

    def _warn(self, job: Job) -> None:
        if job.daemon is not None and job.state == "RUNNING":
            job.daemon.signal()

    def _look_at_limit(self, job: Job) -> None:
        if job.state != "RUNNING" or job.end_time is None or job.preempt_time is not None:
            return
        if (left := job.end_time - self._engine.now) > 0.001:
            self._later(left, job, self._look_at_limit)
        else:
            self._end(job, again=False, reason="TimeLimit", why="TIMEOUT")

    def _resume(self, job: Job) -> None:
        if job.state != "SUSPENDED" or job.suspended_at is None:
            return
        slept = self._engine.now - job.suspended_at
        job.state, job.suspended_at = "RUNNING", None
        job.asleep += slept
        job.end_time = None if job.end_time is None else job.end_time + slept
        for life in self._lives(job):
            life.thaw()
        self._look_at_limit(job)

    def _node_down(self, job: Job, node: int) -> None:
        if job.state != "RUNNING":
            return
        if self._world.setting.no_kill and len(job.nodes) > 1:
            job.nodes = [n for n in job.nodes if n != node]
        else:
            self.put_back(job)

    def _repair(self, node: int) -> None:
        self.up[node] = True
        for job in self.jobs:
            job.excluded.discard(node)

    def _put_back(self, job: Job) -> None:
        job.restarts += 1
        job.preempt_time = None
        if job.state == "COMPLETING":
            job.again = (
                True  # what a requeue does to a job that is being ended, for whatever reason
            )
            self._later(self._world.setting.kill_wait, job, self._kill)
        else:
            self._end(job, again=True)

    def _end(self, job: Job, again: bool, reason: str = "", why: str = "CANCELLED") -> None:
        if job.state not in ("RUNNING", "SUSPENDED"):
            return
        if job.suspended_at is not None:
            job.asleep += self._engine.now - job.suspended_at
            job.suspended_at = None
        job.state, job.reason, job.again, job.end_state = "COMPLETING", reason, again, why
        for life in self._lives(job):
            life.thaw()
        if job.daemon is not None:
            job.daemon.signal()
        if job.ranks is not None:
            job.ranks.signal()
        if job.daemon is None:
            self._world.tell_agents(job, ALONE_AT_A_STOP, ending=True)
        self._later(self._world.setting.kill_wait, job, self._kill)

    def _kill(self, job: Job) -> None:
        if job.state == "COMPLETING":
            self._finish(job, job.end_state)

    def _finish(self, job: Job, state: str) -> None:
        job.life.end()
        if job.batch is not None:
            job.batch.end()
        if job.ranks is not None:
            job.ranks.kill()
        job.batch, job.daemon, job.ranks, job.nodes = None, None, None, []
        if job.again:
            job.state, job.again = "PENDING", False
            restarts = job.restarts
            self._engine.call(self._world.setting.begin, lambda: self._start(job, restarts))
        else:
            job.state = state
            self._world.job_over(job)

    def _lives(self, job: Job) -> list[Life]:
        batch = [] if job.batch is None else [job.batch.daemon.life, job.batch.watchdog_life]
        return [job.life, *batch, *([job.ranks.life] if job.ranks is not None else [])]

    def _later(self, seconds: float, job: Job, act) -> None:  # type: ignore[no-untyped-def]
        """`act(job)` in some seconds, if it is still the same launch of the job."""
        life = job.life
        self._engine.call(seconds, lambda: act(job) if job.life is life else None)
