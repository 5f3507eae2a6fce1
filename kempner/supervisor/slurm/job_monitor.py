"""Watches the supervisor's Slurm job from a thread, and requeues it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.job import JobState, parse_job
from kempner.cluster.slurm.scontrol import SlurmError
from kempner.run.process.logs import logger

LOOK_EVERY = 10.0
"""Seconds between two questions to the controller, which serves the whole cluster."""


@dataclass(frozen=True)
class JobSeen:
    """What the controller said of the job just now.

    `seconds_left` is the time until its end, None without one; `kill_wait` is KillWait in seconds.
    """

    state: JobState
    seconds_left: float | None
    kill_wait: float


def excluded(job: JobState | None, lost: Sequence[str]) -> list[str]:
    """Where a job is not to run: what its user has excluded, and the nodes that it has lost."""
    return [*([job.nodes.excluded] if job is not None and job.nodes.excluded else []), *lost]


class JobMonitor:
    """Asks about the job now and then, and at once where there is a reason to."""

    def __init__(self, job: str, batch: bool, arguments: Sequence[str] | None = None) -> None:
        self.id, self.batch = job, batch
        self.arguments = arguments
        """With which to submit the job again where it cannot be requeued; None to leave that."""
        self._ask = threading.Event()
        self._done = threading.Event()
        self._failing = False
        self._nodes: int | None = None
        self._post: Callable[[JobSeen], None] | None = None

    def watch(self, post: Callable[[JobSeen], None]) -> None:
        """Start to `post` what the controller says, from a thread; called again, to the new one."""
        started, self._post = self._post is not None, post
        if not started:
            threading.Thread(target=self._watch, name="job", daemon=True).start()
        self.look()

    def look(self) -> None:
        """Ask now: something has happened."""
        self._ask.set()

    def close(self) -> None:
        """Ask no more."""
        self._done.set()
        self._ask.set()

    def state(self) -> JobState | None:
        """What the controller says now; None if it does not answer or there is no scontrol."""
        try:
            state = parse_job(scontrol.show_job(self.id))
            self._nodes = self._nodes or state.nodes.count
            return state
        except (SlurmError, ValueError) as error:
            if not self._failing:
                logger().warning("cannot ask Slurm about the job", reason=str(error))
            self._failing = True
            return None

    def finds_others(self, without: Sequence[str]) -> bool | None:
        """Whether its partition has enough nodes besides these and those that its user excludes.

        In whatever state they are: the job can wait. None if Slurm does not say.
        """
        state = self.state()
        if state is None:
            return None
        try:
            nodes = scontrol.partition_nodes(state.nodes.partition)
            barred = {n for part in excluded(state, without) for n in scontrol.hostnames(part)}
        except (SlurmError, KeyError, ValueError) as error:
            logger().warning("cannot ask Slurm about the partition", reason=str(error))
            return None
        return len(nodes - barred) >= (self._nodes or state.nodes.count)

    def requeue(self, without: Sequence[str] = (), after: float = 0.0) -> str:
        """Put the job back into the queue; why not, empty if it was.

        It is kept away from the nodes that it is to do `without`, and waits `after` seconds.
        """
        try:
            scontrol.requeue(self.id)
        except SlurmError as error:
            return str(error)
        self.ask_for_all(without, after)
        return ""

    def ask_for_all(self, without: Sequence[str] = (), after: float = 0.0) -> None:
        """Have the requeued job get as many nodes as it had at first, but not some of them."""
        state = self.state()
        if state is None or self._nodes is None:
            return
        if state.nodes.count == self._nodes and not (without or after):
            return
        barred = excluded(state, without) if without else ()
        try:
            scontrol.ask_for(self.id, nodes=self._nodes, without=barred, after=after)
        except SlurmError as error:
            logger().warning(
                f"the job may come back with fewer than {self._nodes} nodes", reason=str(error)
            )

    def _watch(self) -> None:
        kill_wait = self._configured("KillWait", usual=30.0)
        while not self._done.is_set():
            state = self.state()
            if state is not None and self._post is not None:
                self._failing = False
                end = state.times.end
                left = None if end is None else end - time.time()
                self._post(JobSeen(state, left, kill_wait))
            self._ask.wait(LOOK_EVERY)
            self._ask.clear()

    def node_timeout(self) -> float:
        """Seconds until Slurm, too, sees that a node is gone."""
        return self._configured("SlurmdTimeout", usual=300.0)

    def _configured(self, name: str, usual: float) -> float:
        """Seconds that slurm.conf sets, or Slurm's own default where it does not say."""
        try:
            found = scontrol.configured_seconds(name)
        except SlurmError as error:
            logger().warning(f"taking {name} to be {usual:.0f} s", reason=str(error))
            return usual
        return usual if found is None else found
