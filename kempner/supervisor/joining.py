"""Joins a run from another job: keeps an agent on this node while its job has time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from math import inf
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TypeAlias

from kempner.cluster.slurm.job import JobState
from kempner.cluster.slurm.scontrol import RequeueDecision, put_back
from kempner.run.control.protocol import Phase
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode, UsageError, reason_of_signal
from kempner.run.process.signals import ReceivedSignal, SignalInbox, insists
from kempner.run.process.threads import keep_running, start_thread
from kempner.run.process.worker_process import SAFE_MODULE
from kempner.run.record.events import AttemptEnded, PhaseDurationsLearned
from kempner.run.record.gave_up import refuse_if_given_up
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.invitation import Departure, Invitation, JoinTerms
from kempner.supervisor.launchers.agents.messages import ADDRESSES, PORT, STEP, TOKEN
from kempner.supervisor.monitors.base import PhaseStats, RunTimes
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import decide_requeue
from kempner.supervisor.policy.stop import StandingStop, StopOrder
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobSeen, JobView

ENDS_WITHIN = 15.0
"""Seconds for an agent to end its ranks."""


@dataclass(frozen=True)
class AgentEnded:
    """An agent has ended, with this exit code or minus the number of a signal."""

    agent: Agent
    code: int


class Agent:
    """An agent on this node, in a session of its own. It is told through its standard input when to
    leave, and ends with this process. `post` is called with its end, from a thread."""

    def __init__(
        self, invitation: Invitation, terms: JoinTerms, post: Callable[[AgentEnded], None]
    ) -> None:
        self.invitation, self.began = invitation, time.monotonic()
        at = {ADDRESSES: ",".join(invitation.addresses), PORT: str(invitation.port)}
        step = {STEP: str(time.time_ns() // 1_000_000)}  # higher than that of any agent before it
        self._process = subprocess.Popen(
            [sys.executable, *SAFE_MODULE, node_agent.__name__, invitation.program],
            stdin=subprocess.PIPE,
            cwd=invitation.folder,
            env=os.environ | at | {TOKEN: invitation.token} | step | terms.environment(),
            start_new_session=True,
        )
        start_thread("agent's end", lambda: post(AgentEnded(self, self._process.wait())))

    def depart(self, departure: Departure) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(departure.line())
            self._process.stdin.flush()

    def end(self) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()


LOOK_AT_INVITATION = 1.0
"""Seconds between two looks at the invitation."""


@dataclass(frozen=True)
class InvitationSeen:
    """The invitation has changed, or is gone (None)."""

    invitation: Invitation | None


class InvitationWatch:
    """Watches the invitation's file, and posts changes."""

    def __init__(self, path: Path, post: Callable[[InvitationSeen], None]) -> None:
        self._path, self._post = path, post
        self._seen: Invitation | None = None

    def start(self) -> Invitation | None:
        """The current invitation; later changes are posted from a thread. Raises `UsageError` if it
        is another user's."""
        self._look_once()
        found = self._seen
        keep_running("invitation", self._look)
        return found

    def _look(self) -> None:
        while True:
            time.sleep(LOOK_AT_INVITATION)
            try:
                self._look_once()
            except UsageError as error:
                logger().warning(str(error))

    def _look_once(self) -> None:
        try:
            found = Invitation.read(self._path)
        except OSError as error:
            logger().info("the invitation cannot be read now", reason=error.strerror)
            return
        if found != self._seen:
            self._seen = found
            self._post(InvitationSeen(found))


class StopTimes:
    """The run's `times`, for its changing number of ranks, read from its ledger."""

    def __init__(self, run: RunDirectory) -> None:
        self._run, self.times = run, RunTimes()
        self._read_with: float | None = None
        self._reader: threading.Thread | None = None

    def update(self, left: float | None) -> None:
        """Read the ledger again once half of the seconds have passed that were `left` at the last
        read (None: no end): the run's times change, but a long ledger must not be read often. In a
        thread, so that storage that hangs does not keep the agent from leaving in time."""
        now = inf if left is None else left
        before = self._read_with
        due = before is None or (now < inf and now <= before / 2)
        if due and (self._reader is None or not self._reader.is_alive()):
            self._reader = start_thread("stop times", partial(self._read, now))

    def _read(self, left: float) -> None:
        try:
            history = RunHistory.read(self._run.ledger)
        except OSError as error:
            logger().info("the ledger cannot be read now", reason=error.strerror)
            return
        phases = PhaseStats()
        for event in history.events(PhaseDurationsLearned)[-1:]:
            if (steps := event.phases.get(Phase.STEP)) is not None:
                phases.took(Phase.STEP, steps.median + steps.spread)
        self.times.saves, self.times.phases = history.durations, phases
        self._read_with = left


LOOK = 1.0
"""Seconds between two checks without an event."""

SLURM_ANSWERS = 10.0
"""Seconds to wait for Slurm to report this job's end before joining."""

UNKNOWN_SIGNAL_GRACE = 30.0
"""Seconds to leave after a signal of unknown cause: Slurm's default KillWait."""

EXPLAINED_WITHIN = 2.0
"""Seconds to wait for Slurm to explain a signal."""

AGAIN_AFTER = 1.0
"""Seconds before an agent that has ended is replaced."""

WORKED = 2 * node_agent.ALONE
"""An agent that ran for this many seconds was connected: without a supervisor it ends sooner."""

OVER = "the run is complete"


_Event: TypeAlias = ReceivedSignal | JobSeen | InvitationSeen | AgentEnded


class Joiner:
    """Offers room for `ranks` ranks, and waits `patience` seconds for a supervisor."""

    def __init__(
        self,
        run: RunDirectory,
        ranks: int,
        job: JobMonitor | None,
        signals: SignalInbox,
        patience: float,
    ) -> None:
        self._run, self._ranks, self._job, self._signals = run, ranks, job, signals
        self._patience = patience
        self._incoming: SimpleQueue[_Event] = SimpleQueue()
        self._view, self._stop_times = JobView(job), StopTimes(run)
        self._invitation: Invitation | None = None
        self._agent: Agent | None = None
        self._leaving: StandingStop | None = None
        self._alone_since = time.monotonic()

    def run(self) -> ExitCode:
        """Take part until the run or this job's time is over, or the run has had no supervisor for
        `patience` seconds. Raises `UsageError` if the invitation is another user's, and
        `GaveUpError` if the run was given up."""
        self._signals.react_with(self._incoming.put)
        if self._job is not None:
            self._job.watch(self._incoming.put)
        self._invitation = InvitationWatch(self._run.invitation, self._incoming.put).start()
        if self._invitation is None and self._is_complete():
            return self._is_over()
        try:
            return self._follow()
        finally:
            if self._agent is not None:
                self._agent.end()

    def _follow(self) -> ExitCode:
        began = time.monotonic()
        while True:
            with suppress(Empty):
                if (end := self._take_in(self._incoming.get(timeout=LOOK))) is not None:
                    return end
            if insists(self._signals.received):
                return ExitCode.INTERRUPTED
            self._leave_in_time()
            if self._leaving is not None:
                if self._agent is None:
                    return self._part(self._leaving)
                if time.monotonic() > self._leaving.by:
                    self._agent.end()  # the supervisor has not released it; the job can go back
                continue
            slurm_silent = self._job is not None and self._view.at_first is None
            if slurm_silent and time.monotonic() - began < SLURM_ANSWERS:
                continue
            self._join()
            if self._agent is None and time.monotonic() - self._alone_since > self._patience:
                logger().warning(
                    f"{self._run.path} has had no supervisor for {self._patience:.0f} s"
                )
                return ExitCode.STOPPED

    def _take_in(self, event: _Event) -> ExitCode | None:
        match event:
            case ReceivedSignal():
                if self._job is not None:
                    self._job.look()  # Slurm knows why
            case JobSeen():
                times = self._stop_times.times
                self._view.take_in(event, times.now())
                self._stop_times.update(self._view.seconds_left(times.now()))
            case InvitationSeen(invitation):
                self._invitation = invitation
                if self._agent is not None and invitation not in (None, self._agent.invitation):
                    logger().warning("another supervisor has taken over the run")
                    self._agent.end()
            case AgentEnded(agent, code):
                return self._note_end(agent, code)
        return None

    def _note_end(self, agent: Agent, code: int) -> ExitCode | None:
        self._agent = None
        if code == node_agent.REFUSED_CODE:
            return ExitCode.USAGE
        now = time.monotonic()
        if code == 0 and self._is_complete():
            return self._is_over()
        if code == 0 or now - agent.began > WORKED:
            self._alone_since = now
        if code == 0 and self._invitation == agent.invitation:
            self._invitation = None  # it is about to be withdrawn
        if self._leaving is None:
            logger().info("waiting for a supervisor", agent_ended_with=code)
        time.sleep(AGAIN_AFTER)
        return None

    def _join(self) -> None:
        """Start an agent if there is none and the run has a supervisor."""
        invitation = self._invitation
        if self._agent is not None or invitation is None:
            return
        left = self._view.seconds_to_train(self._stop_times.times)
        until = None if left is None else time.monotonic() + left
        job = "" if self._job is None else self._job.id
        say(f"joining {self._run.path} at {invitation.addresses[0]}:{invitation.port}")
        terms = JoinTerms(job, self._ranks, until, str(self._run.path.absolute()))
        self._agent = Agent(invitation, terms, self._incoming.put)

    def _leave_in_time(self) -> None:
        """Have the agent ask for its release if the end of this job is near or a signal came."""
        signals = self._signals.received
        order = self._view.stop_order(self._stop_times.times, signals)
        if order is None and signals:
            silent_for = time.monotonic() - signals[0].at
            if self._job is None or silent_for > EXPLAINED_WITHIN:
                first = signals[0].signal
                order = StopOrder(reason_of_signal(first), first.name, UNKNOWN_SIGNAL_GRACE)
        if order is None or self._leaving is not None:
            return
        by = time.monotonic() + order.seconds_left
        self._leaving = StandingStop(order.reason, order.sentence, by)
        logger().warning(f"{order.sentence}: leaving the run")
        if self._agent is not None:
            self._agent.depart(Departure(order.seconds_left, order.sentence))

    def _part(self, order: StandingStop) -> ExitCode:
        """Requeue this job, if that is due, so that it joins again; the agent was released."""
        job, decision = self._job, Decision(ExitCode.STOPPED, order.sentence)
        if job is not None and job.batch:
            job.close()
            decide = partial(self._decide, decision)
            end = put_back(job.id, decide, job.try_until(), job.note_silence)
            logger().warning(end.reason)
        return ExitCode.STOPPED

    def _decide(self, decision: Decision, state: JobState) -> RequeueDecision:
        return decide_requeue(decision, self._view.at_first, state, True, fruitless=0)

    def _is_over(self) -> ExitCode:
        say(OVER)
        return ExitCode.COMPLETED

    def _is_complete(self) -> bool:
        """Whether the run is complete. Raises `GaveUpError` if it was given up."""
        try:
            refuse_if_given_up(self._run)
            ended = RunHistory.read(self._run.ledger).events(AttemptEnded)
        except OSError as error:
            logger().info("the ledger cannot be read now", reason=error.strerror)
            return False
        return bool(ended) and ended[-1].code == ExitCode.COMPLETED
