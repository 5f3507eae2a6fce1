"""The daemon: runs one attempt after another, passes stops on, decides how the run ends."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import pairwise
from queue import SimpleQueue

from kempner.cluster.machine.rlimits import raise_open_file_limit
from kempner.cluster.slurm.hostlist import node_of
from kempner.config.sections import Config
from kempner.run.control.launch_env import Control, Launch, LaunchTerms
from kempner.run.control.protocol import Secret
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.logs import logger, open_log
from kempner.run.process.signals import Received, SignalInbox
from kempner.run.record.attempts import Attempt, begin_attempt
from kempner.run.record.events.attempt import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    Restarting,
)
from kempner.run.record.events.job import NodeSuspected
from kempner.run.record.gave_up import refuse_if_given_up
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.attempt import AttemptEvent, AttemptFollower
from kempner.supervisor.control.auth import Membership, listen
from kempner.supervisor.control.file_transport import FileTransport
from kempner.supervisor.control.rank_roster import RankRoster
from kempner.supervisor.control.rank_status import RankStatusFile
from kempner.supervisor.control.server import ControlServer
from kempner.supervisor.give_up import give_up
from kempner.supervisor.launchers.base import Launcher, Program
from kempner.supervisor.lease import Lease
from kempner.supervisor.monitors.run_times import RunTimes
from kempner.supervisor.nodes.health_check import NO_ANSWER
from kempner.supervisor.policy.outcome import Decision, RankExit, decide_outcome
from kempner.supervisor.policy.restart import (
    FAILURES,
    Failure,
    RestartDecision,
    decide_restart,
    failures,
)
from kempner.supervisor.preflight import choose_nodes, nodes_to_exclude
from kempner.supervisor.slurm.job_monitor import JobMonitor
from kempner.supervisor.slurm.job_view import JobView
from kempner.supervisor.slurm.requeue_job import job_facts, requeue_or_explain

LEFT_AT_ONCE = "exited at once on the second Ctrl-C; the last commit is intact"

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""


@dataclass(frozen=True)
class SupervisorContext:
    """What a supervisor looks after, and with what; the same for all attempts."""

    run: RunDirectory
    launcher: Launcher
    program: Program
    config: Config
    signals: SignalInbox
    job: JobMonitor | None
    lease: Lease

    @cached_property
    def ledger(self) -> Ledger:
        """Where the run's events go."""
        return Ledger(self.run.ledger)

    @cached_property
    def history(self) -> RunHistory:
        """What the ledger tells, read once, and then what was added."""
        return RunHistory.read(self.run.ledger)

    def terms(self) -> LaunchTerms | None:
        """What a program of the user's own is told; ours reads the configuration."""
        section = self.config.supervise
        if self.program.ours:
            return None
        return LaunchTerms(self.run.path, section.supervisor_timeout, section.stop_grace)


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    program: Program,
    config: Config,
    signals: SignalInbox,
    job: JobMonitor | None = None,
) -> ExitCode:
    """Start the ranks, and again when they fail, until the run is over or must leave the machine.

    Returns the exit code of the run. Raises `GaveUpError` if it was given up before, `UsageError`
    if it has a supervisor already, and `SupersededError` when another one takes it over.
    """
    refuse_if_given_up(run)
    raise_open_file_limit()
    lease = Lease.acquire(run, config.supervise.lease)
    try:
        context = SupervisorContext(run, launcher, program, config, signals, job, lease)
        return _bring_to_an_end(context)
    finally:
        lease.release()


def _bring_to_an_end(context: SupervisorContext) -> ExitCode:
    """One attempt after the other, until one is the last."""
    while True:
        earlier = failures(context.history.refresh())
        follower, decision = _follow_attempt(context)
        context.lease.check()
        end = _restart_or_finish(context, follower, decision, earlier)
        if end is None:
            continue
        if end.code is not ExitCode.COMPLETED:
            logger().warning(end.reason)
        if context.job is not None:
            number = follower.attempt.number
            requeue_or_explain(
                context.job,
                follower.job.at_first,
                number,
                end,
                context.run,
                context.ledger,
                context.history,
            )
        return end.code


def _restart_or_finish(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    earlier: Sequence[Failure],
) -> Decision | None:
    """Get ready to start again after a failure; how the run ends if that makes no sense."""
    if decision.code not in FAILURES or follower.stop_reason:
        return decision
    attempt, failure = follower.attempt, _failure(context, follower, decision)
    node = node_of(follower.roster.host_of(decision.culprit), context.launcher.nodes)
    context.ledger.record(AttemptFailed(node=node, **asdict(failure)), attempt.number)
    verdict = decide_restart(
        decision, failure, earlier, context.config.supervise.max_restarts_without_progress
    )
    bad = _better_without(context, follower, decision, node, verdict)
    if not (verdict.again or bad):
        final = replace(decision, reason=verdict.reason)
        return replace(final, reason=str(give_up(context.run, attempt, final, failure, node)))
    before = context.launcher.nodes
    unable = context.launcher.prepare_again(follower.roster.lost_hosts())
    for gone in sorted(set(before) - set(context.launcher.nodes)):
        context.ledger.record(NodeSuspected(gone, NO_ANSWER), attempt.number)
    if unable is not None:
        return replace(decision, reason=unable.reason, bad_nodes=unable.nodes)
    if bad:
        reason = "; ".join(f"{name} is suspect: {why}" for name, why in bad.items())
        return replace(decision, reason=reason, bad_nodes=tuple(bad))
    logger().warning(verdict.reason)
    context.ledger.record(Restarting(verdict.reason), attempt.number)
    return None


def _better_without(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    node: str,
    verdict: RestartDecision,
) -> dict[str, str]:
    """Nodes without which the job should go on, by way of the queue, each with a reason.

    None where it cannot, or where the same failure would follow it everywhere.
    """
    first, job = follower.job.at_first, context.job
    if job is None or not job.batch or first is None or not first.may_requeue:
        return {}
    if not verdict.again and decision.code is not ExitCode.CHECKPOINT_FAILED:
        return {}
    code, last = decision.code, verdict.last
    bad = nodes_to_exclude(context.launcher, node, context.history, context.config, code, last)
    return bad if bad and job.finds_others(list(bad)) else {}


def _follow_attempt(context: SupervisorContext) -> tuple[AttemptFollower, Decision]:
    """Start all ranks once and follow them until none is left."""
    launcher, signals = context.launcher, context.signals
    incoming: SimpleQueue[AttemptEvent] = SimpleQueue()
    signals.react_with(incoming.put)  # from here on a stop is passed on to the ranks
    listener = listen(launcher.address, context.config.supervise.ports)
    attempt, secret = _begin(context), Secret.new()
    channel = ControlServer(
        listener,
        Membership(secret, attempt.number, launcher.size),
        FileTransport(context.run, attempt.number, launcher.size),
        incoming.put,
    )
    channel.start()
    follower = _follower(context, attempt, channel)
    control = Control(launcher.address, channel.port, secret)
    launch = Launch(attempt, control, terms=context.terms())
    _see_it_through(context, follower, channel, launch, incoming)
    decision = _outcome(follower)
    follower.tell_phase_durations()
    _close(context.ledger, attempt, decision, follower.ends)
    return follower, decision


def _begin(context: SupervisorContext) -> Attempt:
    """The next attempt is the live one from now on, on the nodes that are fit for it."""
    run, launcher, ledger = context.run, context.launcher, context.ledger
    context.lease.check()
    attempt = begin_attempt(run)
    open_log(run.supervisor_log(attempt.number), attempt=attempt.number)
    choose_nodes(launcher, attempt, run, context.config, ledger, context.history)
    facts = () if context.job is None else job_facts(context.job)
    ledger.record(AttemptStarted(launcher.size, *facts), attempt.number)
    return attempt


def _follower(
    context: SupervisorContext, attempt: Attempt, channel: ControlServer
) -> AttemptFollower:
    """Who follows the attempt, and knows what the ones before it were like."""
    size = context.launcher.size
    return AttemptFollower(
        attempt,
        RankRoster(size, must_report=context.program.ours),
        context.config,
        context.launcher,
        channel,
        context.ledger,
        JobView(context.job),
        RunTimes.from_history(context.history.refresh(), size),
    )


def _see_it_through(
    context: SupervisorContext,
    follower: AttemptFollower,
    channel: ControlServer,
    launch: Launch,
    incoming: SimpleQueue[AttemptEvent],
) -> None:
    """Start the ranks, and act on what happens until the last of them is gone."""
    rank_status = RankStatusFile(context.run.ranks(launch.attempt.number))
    try:
        context.launcher.start(launch, context.program, incoming.put)
        if context.job is not None:
            context.job.watch(incoming.put)
        while not (follower.over() or insists(follower.signals) or context.lease.lost):
            follower.take_in(incoming)
            follower.enforce()
            rank_status.update(channel.last_reports())
    finally:
        context.launcher.kill()
        channel.close()
    context.lease.check()  # or what follows would be written into somebody else's ledger
    follower.take_in(incoming, wait=False)
    rank_status.update(channel.last_reports(), now=True)


def _outcome(follower: AttemptFollower) -> Decision:
    """What the end of an attempt means."""
    if insists(follower.signals):
        return Decision(ExitCode.INTERRUPTED, LEFT_AT_ONCE)
    if follower.hang is not None and not follower.stop_reason:
        return Decision(ExitCode.HUNG, follower.hang.sentence, follower.hang.laggard)
    return decide_outcome(follower.ends, stop_requested=follower.stop_reason)


def _failure(context: SupervisorContext, follower: AttemptFollower, decision: Decision) -> Failure:
    culprit = next((end for end in follower.ends if end.rank == decision.culprit), None)
    raised = culprit.raised if culprit is not None else ""
    return Failure(
        # Of a rank that was killed the last report is old; the others' came as they left.
        step=follower.step_of(decision.culprit if raised else None),
        committed=context.history.refresh().last_step,
        raised=raised,
    )


def insists(received: Sequence[Received]) -> bool:
    """Whether the user pressed Ctrl-C twice within `INSIST_WITHIN` seconds."""
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


def _close(ledger: Ledger, attempt: Attempt, decision: Decision, exits: Sequence[RankExit]) -> None:
    statuses = {str(e.rank): e.status for e in exits}
    ended = AttemptEnded(int(decision.code), decision.reason, decision.culprit, statuses)
    ledger.record(ended, attempt.number)
