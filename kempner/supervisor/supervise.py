"""The daemon: starts an attempt, follows it, passes stop requests on, and tells how it ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from queue import SimpleQueue

from kempner.checkpoint.durations import Durations, last_step
from kempner.cluster.hosts import node_of
from kempner.cluster.limits import raise_open_file_limit
from kempner.config.sections import Config
from kempner.run.attempts import Attempt, begin_attempt
from kempner.run.exit_codes import ExitCode
from kempner.run.gave_up import refuse_if_given_up
from kempner.run.launch import Control, Launch, Terms
from kempner.run.layout import RunDirectory
from kempner.run.ledger import Ledger, read_lines
from kempner.run.logs import logger, open_log
from kempner.run.messages import SUSPECT, Phase, Secret
from kempner.run.signals import Received, SignalInbox
from kempner.supervisor.admission import Membership, listen
from kempner.supervisor.ailments import NO_ANSWER
from kempner.supervisor.channel import Channel
from kempner.supervisor.checkup import blamed, choose_nodes
from kempner.supervisor.file_channel import FileChannel
from kempner.supervisor.giving_up import give_up
from kempner.supervisor.habits import learned
from kempner.supervisor.launcher import Launcher, Program
from kempner.supervisor.lease import Lease
from kempner.supervisor.pace import Pace
from kempner.supervisor.parting import facts, part_from
from kempner.supervisor.policy import Decision, RankExit, decide
from kempner.supervisor.restarts import FAILURES, Failure, Verdict, failures, judge
from kempner.supervisor.roster import Roster
from kempner.supervisor.slurm_job import SlurmJob
from kempner.supervisor.watch import Happening, Watch

LEFT_AT_ONCE = "left at once on the second Ctrl-C; the last commit is intact"

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""


@dataclass(frozen=True)
class Charge:
    """What a supervisor looks after, and with what; the same for all attempts."""

    run: RunDirectory
    launcher: Launcher
    program: Program
    config: Config
    signals: SignalInbox
    job: SlurmJob | None
    ledger: Ledger
    lease: Lease

    def terms(self) -> Terms | None:
        """What a program of the user's own is told; ours reads the configuration."""
        section = self.config.supervise
        if self.program.ours:
            return None
        return Terms(self.run.path, section.silence_limit, section.stop_grace)


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    program: Program,
    config: Config,
    signals: SignalInbox,
    job: SlurmJob | None = None,
) -> ExitCode:
    """Start the ranks, and again when they fail, until the run is over or must leave the machine.

    Returns the exit code of the run. Raises `GaveUpError` if it was given up before, `UsageError`
    if it has a supervisor already, and `SupersededError` when another one takes it over.
    """
    refuse_if_given_up(run)
    raise_open_file_limit()
    lease = Lease.acquire(run, config.supervise.lease)
    try:
        charge = Charge(run, launcher, program, config, signals, job, Ledger(run.ledger), lease)
        return _bring_to_an_end(charge)
    finally:
        lease.release()


def _bring_to_an_end(charge: Charge) -> ExitCode:
    """One attempt after the other, until one is the last."""
    while True:
        earlier = failures(read_lines(charge.run.ledger))
        watch, decision = _follow_attempt(charge)
        charge.lease.check()
        end = _heal(charge, watch, decision, earlier)
        if end is None:
            continue
        if end.code is not ExitCode.COMPLETED:
            logger().warning(end.reason)
        if charge.job is not None:
            part_from(charge.job, watch, end, charge.run, charge.ledger)
        return end.code


def _heal(
    charge: Charge, watch: Watch, decision: Decision, earlier: Sequence[Failure]
) -> Decision | None:
    """Get ready to start again after a failure; how the run ends if that makes no sense."""
    if decision.code not in FAILURES or watch.stop_reason is not None:
        return decision
    attempt, failure = watch.attempt, _failure(charge, watch, decision)
    node = node_of(watch.host_of(decision.culprit), charge.launcher.nodes)
    charge.ledger.record("attempt_failed", attempt=attempt.number, node=node, **asdict(failure))
    verdict = judge(decision, failure, earlier, charge.config.supervise.fruitless_restarts)
    bad = _better_without(charge, watch, decision, node, verdict)
    if not (verdict.again or bad):
        final = replace(decision, reason=verdict.reason)
        return replace(final, reason=str(give_up(charge.run, attempt, final, failure, node)))
    before = charge.launcher.nodes
    unable = charge.launcher.prepare_again(watch.lost_hosts())
    for gone in sorted(set(before) - set(charge.launcher.nodes)):
        charge.ledger.record(SUSPECT, attempt=attempt.number, node=gone, reason=NO_ANSWER)
    if unable is not None:
        return replace(decision, reason=unable.reason, bad_nodes=unable.nodes)
    if bad:
        reason = "; ".join(f"{name} is suspect: {why}" for name, why in bad.items())
        return replace(decision, reason=reason, bad_nodes=tuple(bad))
    logger().warning(verdict.reason)
    charge.ledger.record("restarting", attempt=attempt.number, reason=verdict.reason)
    return None


def _better_without(
    charge: Charge, watch: Watch, decision: Decision, node: str, verdict: Verdict
) -> dict[str, str]:
    """Nodes without which the job should go on, by way of the queue, each with a reason.

    None where it cannot, or where the same failure would follow it everywhere.
    """
    first, job = watch.job_at_first, charge.job
    if job is None or not job.batch or first is None or not first.may_requeue:
        return {}
    if not verdict.again and decision.code is not ExitCode.CHECKPOINT_FAILED:
        return {}
    code, last = decision.code, verdict.last
    bad = blamed(charge.launcher, node, charge.run, charge.config, code, last)
    return bad if bad and job.finds_others(list(bad)) else {}


def _follow_attempt(charge: Charge) -> tuple[Watch, Decision]:
    """Start all ranks once and follow them until none is left."""
    run, config, launcher, job = charge.run, charge.config, charge.launcher, charge.job
    happenings: SimpleQueue[Happening] = SimpleQueue()
    charge.signals.react_with(happenings.put)  # from here on a stop is passed on to the ranks
    listener = listen(launcher.address, config.supervise.ports)
    charge.lease.check()
    attempt, ledger = begin_attempt(run), charge.ledger
    open_log(run.supervisor_log(attempt.number), attempt=attempt.number)
    choose_nodes(launcher, attempt, run, config, ledger)
    size = launcher.size
    ledger.record("attempt_started", attempt=attempt.number, ranks=size, **facts(job))
    secret = Secret.new()
    channel = Channel(
        listener,
        Membership(secret, attempt.number, size),
        FileChannel(run, attempt.number, size),
        happenings.put,
    )
    channel.start()
    past = list(read_lines(run.ledger))
    # A start without a checkpoint says nothing about how long it takes to load one.
    pace = Pace(learned(past, size), unlike=() if last_step(past) else (Phase.LOAD,))
    durations = Durations.from_ledger(past)
    ours = charge.program.ours
    watch = Watch(attempt, size, config, launcher, channel, ledger, durations, job, pace, ours)
    control = Control(launcher.address, channel.port, secret)
    _see_it_through(
        charge, watch, channel, Launch(attempt, control, terms=charge.terms()), happenings
    )
    decision = _outcome(watch)
    watch.notes.keep_habits()
    _close(ledger, attempt, decision, watch.ends)
    return watch, decision


def _see_it_through(
    charge: Charge,
    watch: Watch,
    channel: Channel,
    launch: Launch,
    happenings: SimpleQueue[Happening],
) -> None:
    """Start the ranks, and act on what happens until the last of them is gone."""
    roster = Roster(charge.run.ranks(launch.attempt.number))
    try:
        charge.launcher.start(launch, charge.program, happenings.put)
        if charge.job is not None:
            charge.job.watch(happenings.put)
        while not (watch.over() or insists(watch.signals) or charge.lease.lost):
            watch.take_in(happenings)
            watch.enforce()
            roster.update(channel.sightings())
    finally:
        charge.launcher.kill()
        channel.close()
    charge.lease.check()  # or what follows would be written into somebody else's ledger
    watch.take_in(happenings, wait=False)
    roster.update(channel.sightings(), now=True)


def _outcome(watch: Watch) -> Decision:
    """What the end of an attempt means."""
    if insists(watch.signals):
        return Decision(ExitCode.INTERRUPTED, LEFT_AT_ONCE)
    if watch.hang is not None and watch.stop_reason is None:
        return Decision(ExitCode.HUNG, watch.hang.sentence, watch.hang.laggard)
    return decide(watch.ends, stop_requested=watch.stop_reason is not None)


def _failure(charge: Charge, watch: Watch, decision: Decision) -> Failure:
    culprit = next((end for end in watch.ends if end.rank == decision.culprit), None)
    raised = culprit.raised if culprit is not None else ""
    return Failure(
        # Of a rank that was killed the last report is old; the others' came as they left.
        step=watch.step_of(decision.culprit if raised else None),
        committed=last_step(read_lines(charge.run.ledger)),
        raised=raised,
    )


def insists(received: Sequence[Received]) -> bool:
    """Whether the user pressed Ctrl-C twice within `INSIST_WITHIN` seconds."""
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


def _close(ledger: Ledger, attempt: Attempt, decision: Decision, exits: Sequence[RankExit]) -> None:
    ledger.record(
        "attempt_ended",
        attempt=attempt.number,
        code=int(decision.code),
        reason=decision.reason,
        culprit=decision.culprit,
        exits={str(e.rank): e.status for e in exits},
    )
