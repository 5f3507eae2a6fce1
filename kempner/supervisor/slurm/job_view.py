"""What an attempt knows of its Slurm job: as it was when the attempt began, and as it is now."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from kempner.cluster.slurm.job import JobState
from kempner.run.process.signals import Received
from kempner.supervisor.monitors.run_times import RunTimes
from kempner.supervisor.policy.stop import StopOrder, decide_stop, stop_lead
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobSeen


class JobView:
    """Of one attempt, through the `monitor` of its job; outside of a job there is nothing to see.

    Times are seconds of the attempt's clock.
    """

    def __init__(self, monitor: JobMonitor | None) -> None:
        self._monitor = monitor
        self.at_first: JobState | None = None
        """The job as it was when the attempt began, if Slurm has said so yet."""
        self._seen: JobSeen | None = None
        self._ends_at: float | None = None

    @property
    def id(self) -> str | None:
        """The job's number; None outside of a job."""
        return None if self._monitor is None else self._monitor.id

    def look(self) -> None:
        """Have Slurm asked now: it may know why something has happened."""
        if self._monitor is not None:
            self._monitor.look()

    def take_in(self, seen: JobSeen, now: float) -> None:
        """Slurm has said what the job is like."""
        self.at_first = self.at_first or seen.state
        self._seen, left = seen, seen.seconds_left
        # By the attempt's clock: Slurm, too, does not count the time for which it suspends a job.
        self._ends_at = None if left is None else now + left

    def stop_order(self, times: RunTimes, signals: Sequence[Received]) -> StopOrder | None:
        """Whether the ranks have to stop: the job's end is near, or Slurm is about to end it.

        `signals` are those that came: any may be Slurm's warning, but for a Ctrl-C at a terminal,
        which a batch process has not.
        """
        if self.at_first is None or self._seen is None:
            return None
        job = self._seen.state
        return decide_stop(
            self.at_first,
            job,
            self._seen.kill_wait,
            left=None if self._ends_at is None else self._ends_at - times.now(),
            lead=stop_lead(times.saves, times.phases.quantile(0.95), job.times.limit),
            warned=any(self._may_warn(received) for received in signals),
        )

    def _may_warn(self, received: Received) -> bool:
        batch = self._monitor is not None and self._monitor.batch
        return batch or received.signal is not signal.SIGINT
