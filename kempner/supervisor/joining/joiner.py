"""Joins a run from another job: keeps an agent on this node, for as long as its job has time."""

from __future__ import annotations

import time
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from typing import TypeAlias

from kempner.cluster.slurm.job import JobState
from kempner.cluster.slurm.scontrol import RequeueDecision, put_back
from kempner.run.output.console import say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.signals import ReceivedSignal, SignalInbox, insists
from kempner.run.process.stop_reason import reason_of_signal
from kempner.run.record.events import AttemptEnded
from kempner.run.record.gave_up import refuse_if_given_up
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.joining.agent import Agent, AgentEnded
from kempner.supervisor.joining.invitation_watch import InvitationSeen, InvitationWatch
from kempner.supervisor.joining.stop_times import StopTimes
from kempner.supervisor.launchers.agents import node_agent
from kempner.supervisor.launchers.agents.joined.invitation import Invitation
from kempner.supervisor.launchers.agents.joined.terms import Departure, JoinTerms
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.requeue import decide_requeue
from kempner.supervisor.policy.stop import StandingStop, StopOrder
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobSeen, JobView

LOOK = 1.0
"""Seconds between two looks at what there is to do."""

SLURM_ANSWERS = 10.0
"""Seconds for Slurm to say until when this job runs."""

UNTOLD = 30.0
"""Seconds in which to leave after a signal of unknown cause: Slurm's usual KillWait."""

EXPLAINED_WITHIN = 2.0
"""Seconds for Slurm to say it."""

AGAIN_AFTER = 1.0
"""Seconds before an agent that has ended is followed by another one."""

WORKED = 2 * node_agent.ALONE
"""Seconds after which an agent must have been connected: it does not stay alone for as long."""

OVER = "the run is complete"


_Event: TypeAlias = ReceivedSignal | JobSeen | InvitationSeen | AgentEnded


class Joiner:
    """Has room for `ranks` ranks, and waits for a supervisor for `patience` seconds."""

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
        """Until the run or this job's time is over, or the run has no supervisor for too long.

        Raises `UsageError` if the run takes no node of another job, or not this one.
        """
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
        """Act on what has happened; how this ends, if it does."""
        match event:
            case ReceivedSignal():
                if self._job is not None:
                    self._job.look()  # it knows why
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
        """Start an agent if there is none, and a supervisor to connect to."""
        invitation = self._invitation
        if self._agent is not None or invitation is None:
            return
        left = self._view.seconds_to_train(self._stop_times.times)
        until = None if left is None else time.monotonic() + left
        job = "" if self._job is None else self._job.id
        say(f"joining {self._run.path} at {invitation.addresses[0]}:{invitation.port}")
        self._agent = Agent(invitation, JoinTerms(job, self._ranks, until), self._incoming.put)

    def _leave_in_time(self) -> None:
        """Ask to be released when the end of this job is near, or a signal has asked for it."""
        signals = self._signals.received
        order = self._view.stop_order(self._stop_times.times, signals)
        if order is None and signals:
            silent_for = time.monotonic() - signals[0].at
            if self._job is None or silent_for > EXPLAINED_WITHIN:
                first = signals[0].signal
                order = StopOrder(reason_of_signal(first), first.name, UNTOLD)
        if order is None or self._leaving is not None:
            return
        by = time.monotonic() + order.seconds_left
        self._leaving = StandingStop(order.reason, order.sentence, by)
        logger().warning(f"{order.sentence}: leaving the run")
        if self._agent is not None:
            self._agent.depart(Departure(order.seconds_left, order.sentence))

    def _part(self, order: StandingStop) -> ExitCode:
        """After the agent was released: requeue the job, to join again, if that is due."""
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
        """Whether the run has made all its steps. Raises `GaveUpError` if it was given up."""
        try:
            refuse_if_given_up(self._run)
            ended = RunHistory.read(self._run.ledger).events(AttemptEnded)
        except OSError as error:
            logger().info("the ledger cannot be read now", reason=error.strerror)
            return False
        return bool(ended) and ended[-1].code == ExitCode.COMPLETED
