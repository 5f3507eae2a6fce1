"""`JobMonitor` polls Slurm about the supervisor's job from a thread; `JobView` is what one attempt
knows of the job: its state when the attempt began, and now."""

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
    release_if_held,
)
from kempner.supervisor.watchdog.board import board

LOOK_EVERY, FAR_FROM_END = 10.0, 900.0
"""Seconds between two polls. A job whose end is more than `FAR_FROM_END` seconds away is polled a
third as often, to spare the controller; after a signal it is polled at once."""

SETTINGS_EVERY = 600.0
"""Seconds between two polls of the cluster's settings and clock."""

LATE = 600.0
"""Seconds past the job's end for which to keep trying to requeue it. A controller that is down ends
no job; once it is back, it checks time limits every 30 s."""

WITHOUT_END = 3600.0
"""Seconds for which to try to requeue a job without a time limit."""

WAIT_SHARE = 0.6
"""Share of the margin before the job's end: with less time left, the supervisor waits for nothing
before it requeues the job. Later the watchdog requeues it."""

WARN_AFTER = 15.0
"""Seconds without an answer from Slurm after which the log warns of it."""

DEFAULTS = ClusterSettings(kill_wait=30.0, node_timeout=300.0, ahead=None)
"""Slurm's defaults, used until the controller reports its settings."""


@dataclass(frozen=True)
class JobSeen:
    """What the controller reported of the job.

    `seconds_left` is the time until its end, None without a time limit; `kill_wait` is Slurm's
    KillWait in seconds; `asked_at` is the time of the poll (`time.monotonic`, seconds); `grace` is
    the partition's GraceTime in seconds, infinite if its jobs are not preempted, None if not known
    yet."""

    state: JobState
    seconds_left: float | None
    kill_wait: float
    asked_at: float = inf
    grace: float | None = None


@dataclass
class _Silence:
    """Slurm has not answered since then (`time.monotonic`, seconds); `warned` if the log says
    so."""

    since: float
    warned: bool = False


class JobMonitor:
    """Polls Slurm about a job: at intervals, and at once after `look`."""

    def __init__(self, job: str, batch: bool, arguments: Sequence[str] | None = None) -> None:
        self.id, self.batch = job, batch
        self.arguments = arguments
        """The arguments with which to submit the job again if it cannot be requeued; None not
        to."""
        self._ask, self._done = threading.Event(), threading.Event()
        self._silence: _Silence | None = None
        self.nodes = NodesWatch(job, batch)
        self._nodes: int | None = None
        self._running: JobState | None = None
        self._settings, self._settings_due = DEFAULTS, 0.0
        self._grace: float | None = None
        self._post: Callable[[JobSeen], None] | None = None

    def watch(self, post: Callable[[JobSeen], None]) -> None:
        """Start to `post` each state from a thread; a second call replaces `post`."""
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
        """The job's state now; None if Slurm does not answer `within` seconds."""
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
        """Whether the job can be requeued, so that the run continues in it."""
        known = self.last_known() if self.batch else None
        return known is not None and known.may_requeue

    def last_known(self) -> JobState | None:
        return self._running or self.state()

    def note_silence(self, error: SlurmError) -> None:
        """Log that Slurm gave no answer; warn once if that lasts."""
        now = time.monotonic()
        if self._silence is None:
            self._silence = _Silence(now)
            logger().info("Slurm gave no answer", reason=str(error))
        elif not self._silence.warned and now - self._silence.since > WARN_AFTER:
            self._silence.warned = True
            logger().warning("Slurm gives no answer; asking again", reason=str(error))

    def try_until(self) -> float:
        """When to stop trying to requeue the job (`time.monotonic`, seconds)."""
        left = None if self._running is None else self.seconds_left(self._running)
        return time.monotonic() + (WITHOUT_END if left is None else left + LATE)

    def seconds_left(self, state: JobState) -> float | None:
        """Seconds until the job's end; None without a time limit.

        Measured by the controller's clock once that is known: this host's clock may be minutes
        off."""
        return None if state.times.end is None else state.times.end - self._now()

    def clock(self) -> float:
        """Seconds since the epoch by the controller's clock, or by this host's if that is not
        known. Times that Slurm reports, and the clocks of other nodes, are compared with it."""
        if self._settings.ahead is None:
            self._learn_settings(within=0.0)
        return self._now()

    def _now(self) -> float:
        ahead = self._settings.ahead
        return time.time() if ahead is None else time.monotonic() + ahead

    def has_other_nodes(self, without: Sequence[str], within: float = SHORTLY) -> bool | None:
        """Whether the job could run on enough nodes other than `without` and those excluded now, in
        whatever state: it can wait for them. None if Slurm does not say."""
        state = self.state(within)
        if state is None:
            return None
        found = candidates(state, expanded(state.nodes.excluded))
        return None if found is None else len(found - set(without)) >= self.needed(state)

    def needed(self, state: JobState) -> int:
        """The number of nodes that the job had at first, and asks for again."""
        return self._nodes or state.nodes.count

    def ask_for_all(
        self,
        state: JobState | None,
        without: Exclusion | None = None,
        after: float = 0.0,
        within: float = SHORTLY,
    ) -> bool:
        """Have the requeued job get as many nodes as it had at first, but none of those in
        `without`, and not start before `after` seconds. `state` is its last known state. Returns
        whether Slurm has taken that over."""
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
        if seen is None or without is None or release_if_held(self.id, seen, without):
            return True
        # Slurm may report success without having changed the job.
        missing = set(without.nodes) - set(expanded(seen.nodes.excluded))
        if missing:
            logger().warning("Slurm has not excluded a node of the job yet", nodes=sorted(missing))
        return not missing

    def node_timeout(self, within: float = SHORTLY) -> float:
        """Seconds after which Slurm takes a node for lost (SlurmdTimeout)."""
        self._learn_settings(within)
        return self._settings.node_timeout

    def leave(self, nodes: Collection[str], within: float = 0.0) -> None:
        """Give these nodes back as soon as Slurm would give them to no other job; until then the
        job keeps them. Waits for that, at most `within` seconds."""
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
        """Post the job's state; False if Slurm did not answer."""
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
        if self._grace is None:  # used at the next look: a warning is not urgent
            self._grace = _grace_of(state.nodes.partition)
        return True

    def _note(self, state: JobState) -> None:
        if self._silence is not None and self._silence.warned:
            logger().warning("Slurm answers again")
        self._silence = None
        self._nodes = self._nodes or state.nodes.count
        self._running = state if state.running else self._running

    def _learn_settings(self, within: float) -> None:
        """Ask for the cluster's settings and clock if that is due."""
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
        has_clock = self._settings.ahead is not None
        self._settings_due = time.monotonic() + (SETTINGS_EVERY if has_clock else LOOK_EVERY)


def _grace_of(partition: str) -> float | None:
    try:
        grace = scontrol.preemption_grace(scontrol.show_partition(partition, within=0.0))
        return inf if grace is None else grace
    except (SlurmError, ValueError) as error:
        logger().info("cannot ask Slurm about the partition", reason=str(error))
        return None


class JobView:
    """What one attempt knows of its job, through `monitor`; nothing if there is no job.

    Times are seconds of the attempt's clock."""

    def __init__(self, monitor: JobMonitor | None) -> None:
        self._monitor = monitor
        self.id = None if monitor is None else monitor.id
        """The job id; None outside of a job."""
        self.at_first: JobState | None = None
        """The job's state when the attempt began; None until Slurm has reported it."""
        self._seen: JobSeen | None = None
        self._ends_at: float | None = None
        self._warned = False

    def look(self) -> None:
        if self._monitor is not None:
            self._monitor.look()

    def is_ending(self) -> bool:
        """Ask Slurm whether it preempts or ends the job. Then it has signalled the tasks, but
        perhaps not this process."""
        state = None if self._monitor is None else self._monitor.state()
        return state is not None and (not state.running or state.times.preempt is not None)

    def take_in(self, seen: JobSeen, now: float) -> None:
        self.at_first = self.at_first or seen.state
        self._seen, left = seen, seen.seconds_left
        # By the attempt's clock, which stands still while the job is suspended, as Slurm's does.
        self._ends_at = None if left is None else now + left

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the end of a running or suspended job; None if it has no end or is not
        known."""
        if self._ends_at is None or self._seen is None:
            return None
        job = self._seen.state
        if not job.running:
            return None
        return self._ends_at - now

    def stop_order(self, times: RunTimes, signals: Sequence[ReceivedSignal]) -> StopOrder | None:
        """The order to stop if the job's end is near or Slurm is about to end it, else None.

        `signals` are those received. Any of them may be Slurm's warning, except SIGINT outside of a
        batch process, which is a Ctrl-C. A signal that came after the last poll does not count yet:
        the next poll may show a requeue or a cancel."""
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
        warning = warn_of_slow_saves(times.saves, left, lead, job.times.limit)
        self._warned = warning is not None
        return warning

    def too_late_to_wait(self, times: RunTimes) -> bool:
        """Whether the rest of the job's time is needed to requeue it, so that nothing may be waited
        for."""
        left = self.seconds_left(times.now())
        if left is None or self._seen is None or self._seen.state.times.preempt is not None:
            return False
        return left <= WAIT_SHARE * self._lead_and_margin(times, self._seen.state.times.limit)[1]

    def ends_within(self, seconds: float, times: RunTimes) -> bool:
        """Whether a stop has to begin within `seconds` (fewer in a short job)."""
        left = self.seconds_to_train(times)
        if left is None or self._seen is None:
            return False
        limit = self._seen.state.times.limit
        return left <= (seconds if limit is None else min(seconds, MARGIN_SHARE * limit))

    def seconds_to_train(self, times: RunTimes) -> float | None:
        """Seconds until a stop has to begin; None if the job has no end or is not known."""
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
