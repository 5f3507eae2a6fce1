"""The daemon: starts an attempt, follows it, passes stop requests on, and tells how it ended."""

from __future__ import annotations

import signal
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from queue import SimpleQueue

from kempner.checkpoint.durations import Durations, last_step
from kempner.cluster.hosts import node_of
from kempner.cluster.limits import raise_open_file_limit
from kempner.config.sections import Config
from kempner.run.attempts import Attempt, begin_attempt
from kempner.run.exit_codes import ExitCode
from kempner.run.launch import Control, Launch
from kempner.run.layout import RunDirectory
from kempner.run.ledger import Ledger, read_lines
from kempner.run.logs import logger, open_log
from kempner.run.messages import Secret
from kempner.run.signals import Received, SignalInbox
from kempner.supervisor.admission import Membership, listen
from kempner.supervisor.channel import Channel
from kempner.supervisor.checkup import choose_nodes
from kempner.supervisor.file_channel import FileChannel
from kempner.supervisor.launcher import Launcher
from kempner.supervisor.parting import facts, part_from
from kempner.supervisor.policy import Decision, RankExit, decide
from kempner.supervisor.restarts import HEALED_BY_A_RESTART, Failure, failures, judge
from kempner.supervisor.roster import Roster
from kempner.supervisor.slurm_job import SlurmJob
from kempner.supervisor.watch import Happening, Watch

LEFT_AT_ONCE = "left at once on the second Ctrl-C; the last commit is intact"

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    arguments: Sequence[str],
    config: Config,
    signals: SignalInbox,
    job: SlurmJob | None = None,
) -> ExitCode:
    """Start the ranks, and again when they fail, until the run is over or must leave the machine.

    Returns the exit code of the run.
    """
    raise_open_file_limit()
    ledger = Ledger(run.ledger)
    while True:
        earlier = failures(read_lines(run.ledger))
        watch, decision = _follow_attempt(run, launcher, arguments, config, signals, job)
        if decision.code in HEALED_BY_A_RESTART and watch.stop_reason is None:
            failure = _failure(run, watch, decision)
            verdict = judge(decision, failure, earlier, config.supervise.fruitless_restarts)
            node = node_of(watch.host_of(decision.culprit), launcher.nodes)
            failed = watch.attempt.number
            ledger.record("attempt_failed", attempt=failed, node=node, **asdict(failure))
            unable = launcher.prepare_again(watch.lost_hosts()) if verdict.again else None
            if verdict.again and unable is None:
                logger().warning(verdict.reason)
                ledger.record("restarting", attempt=watch.attempt.number, reason=verdict.reason)
                continue
            if unable is not None:
                decision = replace(decision, reason=unable.reason, bad_nodes=unable.nodes)
            else:
                decision = replace(decision, reason=verdict.reason)
                ledger.record("gave_up", attempt=watch.attempt.number, reason=decision.reason)
        if decision.code is not ExitCode.COMPLETED:
            logger().warning(decision.reason)
        if job is not None:
            part_from(job, watch, decision, run, ledger)
        return decision.code


def _follow_attempt(
    run: RunDirectory,
    launcher: Launcher,
    arguments: Sequence[str],
    config: Config,
    signals: SignalInbox,
    job: SlurmJob | None,
) -> tuple[Watch, Decision]:
    """Start all ranks once and follow them until none is left."""
    happenings: SimpleQueue[Happening] = SimpleQueue()
    signals.react_with(happenings.put)  # from here on a stop is passed on to the ranks
    listener = listen(launcher.address, config.supervise.ports)
    attempt = begin_attempt(run)
    open_log(run.supervisor_log(attempt.number), attempt=attempt.number)
    ledger = Ledger(run.ledger)
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
    durations = Durations.from_ledger(read_lines(run.ledger))
    watch = Watch(attempt, size, config, launcher, channel, ledger, durations, job)
    roster = Roster(run.ranks(attempt.number))
    try:
        control = Control(launcher.address, channel.port, secret)
        launcher.start(Launch(attempt, control), arguments, happenings.put)
        if job is not None:
            job.watch(happenings.put)
        while not watch.over() and not insists(watch.signals):
            watch.take_in(happenings)
            watch.enforce()
            roster.update(channel.sightings())
    finally:
        launcher.kill()
        channel.close()
    watch.take_in(happenings, wait=False)
    roster.update(channel.sightings(), now=True)
    if insists(watch.signals):
        decision = Decision(ExitCode.INTERRUPTED, LEFT_AT_ONCE)
    elif watch.hang is not None and watch.stop_reason is None:
        decision = Decision(ExitCode.HUNG, watch.hang.sentence, watch.hang.laggard)
    else:
        decision = decide(watch.ends, stop_requested=watch.stop_reason is not None)
    _close(ledger, attempt, decision, watch.ends)
    return watch, decision


def _failure(run: RunDirectory, watch: Watch, decision: Decision) -> Failure:
    culprit = next((end for end in watch.ends if end.rank == decision.culprit), None)
    return Failure(
        step=watch.furthest_step(),
        committed=last_step(read_lines(run.ledger)),
        raised=culprit.sentence.partition("\n")[0] if culprit is not None else "",
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
