"""What an attempt knows of its Slurm job: as it was when the attempt began, and as it is now."""

from __future__ import annotations

import signal
from collections.abc import Sequence

from kempner.cluster.slurm.job import JobState
from kempner.run.process.signals import Received
from kempner.supervisor.monitors.run_times import RunTimes
from kempner.supervisor.policy.stop import (
    MARGIN_SHARE,
    StopOrder,
    decide_stop,
    exit_margin,
    stop_lead,
    warn_of_slow_saves,
)
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
        self._warned = False

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

    def seconds_left(self, now: float) -> float | None:
        """Until the end of a job that runs or is suspended; None without one, or if not known."""
        if self._ends_at is None or self._seen is None:
            return None
        job = self._seen.state
        if not (job.running or job.state == "SUSPENDED"):
            return None
        return self._ends_at - now

    def stop_order(self, times: RunTimes, signals: Sequence[Received]) -> StopOrder | None:
        """Whether the ranks have to stop: the job's end is near, or Slurm is about to end it.

        `signals` are those that came: any may be Slurm's warning, but for a Ctrl-C at a terminal,
        which a batch process has not. One that came since Slurm was asked says nothing yet: Slurm
        may be about to say that it was a requeue or a cancel.
        """
        if self.at_first is None or self._seen is None:
            return None
        job, asked_at = self._seen.state, self._seen.asked_at
        lead, margin = self._lead_and_margin(times, job.times.limit)
        return decide_stop(
            self.at_first,
            job,
            self._seen.kill_wait,
            self.seconds_left(times.now()),
            lead=lead,
            margin=margin,
            warned=any(s.at <= asked_at and self._may_warn(s) for s in signals),
        )

    def warning(self, times: RunTimes) -> str | None:
        """What there is to say, once an attempt, of saves that take too long for this job."""
        if self._warned or self._seen is None:
            return None
        job, grace = self._seen.state, self._seen.grace
        left = None if grace is None else grace + self._seen.kill_wait
        lead, _ = self._lead_and_margin(times, job.times.limit)
        said = warn_of_slow_saves(times.saves, left, lead, job.times.limit)
        self._warned = said is not None
        return said

    def ends_within(self, seconds: float, times: RunTimes) -> bool:
        """Whether a stop has to begin within so many seconds (fewer in a short job), or by now."""
        left = self.seconds_to_train(times)
        if left is None or self._seen is None:
            return False
        limit = self._seen.state.times.limit
        return left <= (seconds if limit is None else min(seconds, MARGIN_SHARE * limit))

    def seconds_to_train(self, times: RunTimes) -> float | None:
        """Until a stop has to begin; None without an end, or if it is not known."""
        left = self.seconds_left(times.now())
        if left is None or self._seen is None:
            return None
        return left - self._lead_and_margin(times, self._seen.state.times.limit)[0]

    def _lead_and_margin(self, times: RunTimes, limit: float | None) -> tuple[float, float]:
        margin = exit_margin(times.leaves, limit)
        return stop_lead(times.saves, times.phases.quantile(0.95), limit, margin), margin

    def _may_warn(self, received: Received) -> bool:
        batch = self._monitor is not None and self._monitor.batch
        return batch or received.signal is not signal.SIGINT
