"""Watches the supervisor's Slurm job from a thread, and knows when it ends.

What an attempt knows of its Slurm job: as it was when the attempt began, and as it is now."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from math import inf

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SHORTLY, SlurmError, next_pause, patiently
from kempner.cluster.slurm.job import JobState
from kempner.cluster.slurm.scontrol import ClusterSettings
from kempner.run.output.logs import logger
from kempner.run.process.signals import ReceivedSignal
from kempner.run.process.threads import keep_running
from kempner.supervisor.monitors.base import RunTimes
from kempner.supervisor.policy.stop import (
    MARGIN_SHARE,
    StopOrder,
    decide_stop,
    exit_margin,
    stop_lead,
    warn_of_slow_saves,
)
from kempner.supervisor.slurm.job_nodes import (
    Exclusion,
    NodesWatch,
    candidates,
    expanded,
    let_go_if_held,
)
from kempner.supervisor.watchdog.board import board

LOOK_EVERY, FAR_FROM_END = 10.0, 900.0
"""Seconds between two questions to the controller, which serves the whole cluster, and before the
end of a job until which a third of them are enough: signals are followed by a look of their
own."""

SETTINGS_EVERY = 600.0
"""Seconds between two questions about the cluster's settings and clock."""

LATE = 600.0
"""Seconds after the end of a job for which to go on trying to requeue it: a controller that is away
ends no job, and one that is back looks at time limits every 30 s."""

WITHOUT_END = 3600.0
"""Seconds for which to try so in a job without a time limit."""

WAIT_SHARE = 0.6
"""Of the margin at the job's end, what is left of it when nothing is waited for any longer. Later,
the watchdog puts the job back."""

TOLD_AFTER = 15.0
"""Seconds of silence after which the job's log tells of it: a single lost answer is nothing."""

USUAL = ClusterSettings(kill_wait=30.0, node_timeout=300.0, ahead=None)
"""Slurm's defaults, as long as the controller has not said what it uses."""


@dataclass(frozen=True)
class JobSeen:
    """What the controller said of the job just now.

    `seconds_left` is the time until its end, None without one; `kill_wait` is KillWait in seconds;
    `asked_at` is when it was asked (`time.monotonic`, seconds); `grace` the partition's GraceTime
    in seconds, infinite if its jobs are not preempted, None as long as Slurm has not said."""

    state: JobState
    seconds_left: float | None
    kill_wait: float
    asked_at: float = inf
    grace: float | None = None


@dataclass
class _Silence:
    """Since when Slurm gives no answer (`time.monotonic`, seconds), and whether that was told."""

    since: float
    told: bool = False


class JobMonitor:
    """Asks about the job now and then, and at once where there is a reason to."""

    def __init__(self, job: str, batch: bool, arguments: Sequence[str] | None = None) -> None:
        self.id, self.batch = job, batch
        self.arguments = arguments
        """With which to submit the job again where it cannot be requeued; None to leave that."""
        self._ask, self._done = threading.Event(), threading.Event()
        self._silence: _Silence | None = None
        self.nodes = NodesWatch(job, batch)
        self._nodes: int | None = None
        self._running: JobState | None = None
        self._settings, self._settings_due = USUAL, 0.0
        self._grace: float | None = None
        self._post: Callable[[JobSeen], None] | None = None

    def watch(self, post: Callable[[JobSeen], None]) -> None:
        """Start to `post` what the controller says, from a thread; called again, to the new one."""
        started, self._post = self._post is not None, post
        if not started:
            keep_running("job", self._watch)
        self.look()

    def look(self) -> None:
        self._ask.set()

    def close(self) -> None:
        self._done.set()
        self._ask.set()

    def state(self, within: float = SHORTLY) -> JobState | None:
        """What the controller says now; None if it does not, asked for `within` seconds."""
        try:
            state = patiently(
                lambda: scontrol.job_state(self.id, within=0.0), within, self.note_silence
            )
        except SlurmError as error:
            self.note_silence(error)
            return None
        self._note(state)
        return state

    @property
    def comes_back(self) -> bool:
        """Whether the job can be put back into the queue, to go on by way of it."""
        known = self.last_known() if self.batch else None
        return known is not None and known.may_requeue

    def last_known(self) -> JobState | None:
        return self._running or self.state()

    def note_silence(self, error: SlurmError) -> None:
        """Slurm gave no answer; said once, if it goes on."""
        now = time.monotonic()
        if self._silence is None:
            self._silence = _Silence(now)
            logger().info("Slurm gave no answer", reason=str(error))
        elif not self._silence.told and now - self._silence.since > TOLD_AFTER:
            self._silence.told = True
            logger().warning("Slurm gives no answer; asking again", reason=str(error))

    def try_until(self) -> float:
        """When to stop trying to requeue the job (`time.monotonic`, seconds)."""
        left = None if self._running is None else self.seconds_left(self._running)
        return time.monotonic() + (WITHOUT_END if left is None else left + LATE)

    def seconds_left(self, state: JobState) -> float | None:
        """Seconds until the job's end, None without one.

        By the controller's clock alone, once it has told it: this host's may be minutes off."""
        return None if state.times.end is None else state.times.end - self._now()

    def clock(self) -> float:
        """Seconds since the epoch by the controller's clock; by this host's where it is not told.

        Slurm's own times, and whose clock is wrong, are judged by it."""
        if self._settings.ahead is None:
            self._learn_settings(within=0.0)
        return self._now()

    def _now(self) -> float:
        ahead = self._settings.ahead
        return time.time() if ahead is None else time.monotonic() + ahead

    def finds_others(self, without: Sequence[str], within: float = SHORTLY) -> bool | None:
        """Whether it could run on enough nodes besides these and those that are excluded now.

        In whatever state they are: the job can wait. None if Slurm does not say."""
        state = self.state(within)
        if state is None:
            return None
        found = candidates(state, expanded(state.nodes.excluded))
        return None if found is None else len(found - set(without)) >= self.needed(state)

    def needed(self, state: JobState) -> int:
        """How many nodes the job had at first, and is to get again."""
        return self._nodes or state.nodes.count

    def ask_for_all(
        self,
        state: JobState | None,
        without: Exclusion | None = None,
        after: float = 0.0,
        within: float = SHORTLY,
    ) -> bool:
        """Have the requeued job get as many nodes as it had at first, but not some of them.

        `state` is the job as it was seen last; it waits `after` seconds. Whether that is so now."""
        if state is None or self._nodes is None:
            return True
        barred = None if without is None else without.nodes
        same = barred is None or set(barred) == set(expanded(state.nodes.excluded))
        if state.nodes.count == self._nodes and same and not after:
            return True
        try:
            scontrol.ask_for(self.id, nodes=self._nodes, without=barred, after=after, within=within)
        except SlurmError as error:
            logger().warning(
                f"the job may come back with fewer than {self._nodes} nodes", reason=str(error)
            )
            return False
        seen = None if without is None else self.state(within)
        if seen is None or without is None or let_go_if_held(self.id, seen, without):
            return True
        missing = set(without.nodes) - set(expanded(seen.nodes.excluded))  # whatever Slurm has said
        if missing:
            logger().warning("Slurm has not excluded a node of the job yet", nodes=sorted(missing))
        return not missing

    def node_timeout(self, within: float = SHORTLY) -> float:
        """Seconds until Slurm, too, sees that a node is gone."""
        self._learn_settings(within)
        return self._settings.node_timeout

    def leave(self, nodes: Collection[str], within: float = 0.0) -> None:
        """Do without these nodes, and give them back as soon as no other job would get them; wait
        for that for `within` seconds. Until then the job keeps them."""
        self.nodes.leave(nodes)
        self._ask.set()
        self.nodes.wait_for_return(nodes, within)

    def _watch(self) -> None:
        failures, due = 0, 0.0
        while not self._done.is_set():
            if self._ask.is_set() or failures or time.monotonic() >= due:
                self._ask.clear()
                failures = 0 if self._look_once() else failures + 1
                due = time.monotonic() + self.next_look()
            if not failures and time.monotonic() >= self.nodes.due:
                self._look_at_nodes()
            next_look = min(due, self.nodes.due) - time.monotonic()
            self._ask.wait(next_pause(failures) if failures else max(0.0, next_look))

    def _look_at_nodes(self) -> None:
        if self._running is None:
            self.nodes.due = time.monotonic() + self.next_look()
            return
        try:
            self.nodes.look(self._running, self._now())
        except (SlurmError, ValueError) as error:
            logger().info("cannot ask Slurm about the job's nodes", reason=str(error))

    def next_look(self) -> float:
        job = self._running
        if job is None or job.times.preempt is not None:
            return LOOK_EVERY
        left = self.seconds_left(job)
        return LOOK_EVERY if left is not None and left < FAR_FROM_END else 3 * LOOK_EVERY

    def _look_once(self) -> bool:
        """Post what the controller says; whether it said something."""
        asked_at, state = time.monotonic(), self.state(within=0.0)
        if state is None:
            return False
        self._learn_settings(within=0.0)
        if self._post is not None:
            left, kill_wait = self.seconds_left(state), self._settings.kill_wait
            self._post(JobSeen(state, left, kill_wait, asked_at, self._grace))
            preempted = state.times.preempt is not None  # Slurm requeues it itself
            if left is not None and not state.running and state.may_go_back:
                left += kill_wait  # at its time limit: Slurm takes it back until it kills it
            at = None if left is None or preempted else time.monotonic() + left
            board().tell_end(at, state.times.end)
        if self._grace is None:  # for the next time: nothing waits for a warning
            self._grace = _grace_of(state.nodes.partition)
        return True

    def _note(self, state: JobState) -> None:
        if self._silence is not None and self._silence.told:
            logger().warning("Slurm answers again")
        self._silence = None
        self._nodes = self._nodes or state.nodes.count
        self._running = state if state.running else self._running

    def _learn_settings(self, within: float) -> None:
        """Ask for the cluster's settings and clock, unless they were just asked for."""
        if time.monotonic() < self._settings_due:
            return
        before = self._settings.series
        try:
            self._settings = scontrol.cluster_settings(within)
        except SlurmError as error:
            logger().info("cannot ask Slurm about its settings", reason=str(error))
            return
        if self._settings.series not in (before, *scontrol.TRIED):
            logger().warning(
                f"Slurm {self._settings.series}: kempner was tried with "
                f"{', '.join(scontrol.TRIED)} (docs/sites.md), and goes on"
            )
        told = self._settings.ahead is not None
        self._settings_due = time.monotonic() + (SETTINGS_EVERY if told else LOOK_EVERY)


def _grace_of(partition: str) -> float | None:
    try:
        grace = scontrol.preemption_grace(scontrol.show_partition(partition, within=0.0))
        return inf if grace is None else grace
    except (SlurmError, ValueError) as error:
        logger().info("cannot ask Slurm about the partition", reason=str(error))
        return None


class JobView:
    """Of one attempt, through the `monitor` of its job; outside of a job there is nothing to see.

    Times are seconds of the attempt's clock."""

    def __init__(self, monitor: JobMonitor | None) -> None:
        self._monitor = monitor
        self.id = None if monitor is None else monitor.id
        """The job's number; None outside of a job."""
        self.at_first: JobState | None = None
        """The job as it was when the attempt began, if Slurm has said so yet."""
        self._seen: JobSeen | None = None
        self._ends_at: float | None = None
        self._warned = False

    def look(self) -> None:
        if self._monitor is not None:
            self._monitor.look()

    def is_ending(self) -> bool:
        """Whether Slurm says, asked now, that it preempts or ends the job: then it has signalled
        the tasks, and this process perhaps not."""
        state = None if self._monitor is None else self._monitor.state()
        return state is not None and (not state.running or state.times.preempt is not None)

    def take_in(self, seen: JobSeen, now: float) -> None:
        self.at_first = self.at_first or seen.state
        self._seen, left = seen, seen.seconds_left
        # By the attempt's clock: Slurm, too, does not count the time for which it suspends a job.
        self._ends_at = None if left is None else now + left

    def seconds_left(self, now: float) -> float | None:
        """Until the end of a job that runs or is suspended; None without one, or if not known."""
        if self._ends_at is None or self._seen is None:
            return None
        job = self._seen.state
        if not job.running:
            return None
        return self._ends_at - now

    def stop_order(self, times: RunTimes, signals: Sequence[ReceivedSignal]) -> StopOrder | None:
        """Whether the ranks have to stop: the job's end is near, or Slurm is about to end it.

        `signals` are those that came: any may be Slurm's warning, but for a Ctrl-C at a terminal,
        which a batch process has not. One that came since Slurm was asked says nothing yet: Slurm
        may be about to say that it was a requeue or a cancel."""
        if self.at_first is None or self._seen is None:
            return None
        job, asked_at = self._seen.state, self._seen.asked_at
        lead, margin = self._lead_and_margin(times, job.times.limit)
        board().tell_margin(margin)
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
        if self._warned or self._seen is None:
            return None
        job, grace = self._seen.state, self._seen.grace
        left = None if grace is None else grace + self._seen.kill_wait
        lead, _ = self._lead_and_margin(times, job.times.limit)
        said = warn_of_slow_saves(times.saves, left, lead, job.times.limit)
        self._warned = said is not None
        return said

    def too_late_to_wait(self, times: RunTimes) -> bool:
        """Whether what is left of the job's time is needed to put it back into the queue, whatever
        is waited for."""
        left = self.seconds_left(times.now())
        if left is None or self._seen is None or self._seen.state.times.preempt is not None:
            return False
        return left <= WAIT_SHARE * self._lead_and_margin(times, self._seen.state.times.limit)[1]

    def ends_within(self, seconds: float, times: RunTimes) -> bool:
        """Whether a stop has to begin within `seconds` (fewer in a short job), or by now."""
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

    def _may_warn(self, received: ReceivedSignal) -> bool:
        batch = self._monitor is not None and self._monitor.batch
        return batch or received.signal is not signal.SIGINT
