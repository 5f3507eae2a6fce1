"""The daemon: starts an attempt, follows it, passes stop requests on, and tells how it ended."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from itertools import pairwise
from queue import SimpleQueue

from kempner.checkpoint.durations import Durations
from kempner.cluster.job import JobState, restart_count
from kempner.cluster.limits import raise_open_file_limit
from kempner.config.sections import SuperviseSection
from kempner.run.attempts import Attempt, begin_attempt
from kempner.run.exit_codes import ExitCode
from kempner.run.launch import Control, Launch
from kempner.run.layout import RunDirectory
from kempner.run.ledger import Ledger, read_lines
from kempner.run.logs import logger, open_log
from kempner.run.messages import Secret
from kempner.run.signals import Received, SignalInbox
from kempner.supervisor.admission import Membership, listen
from kempner.supervisor.advice import fruitless_requeues, last_step, part
from kempner.supervisor.channel import Channel
from kempner.supervisor.file_channel import FileChannel
from kempner.supervisor.launcher import Launcher
from kempner.supervisor.policy import Decision, RankExit, decide
from kempner.supervisor.roster import Roster
from kempner.supervisor.slurm_job import SlurmJob
from kempner.supervisor.watch import Happening, Watch

INSIST_WITHIN = 2.0
"""Seconds within which a second Ctrl-C means: now."""


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    arguments: Sequence[str],
    size: int,
    section: SuperviseSection,
    signals: SignalInbox,
    job: SlurmJob | None = None,
) -> ExitCode:
    """Run one attempt to its end, and do what is then to be done; returns the run's exit code."""
    happenings: SimpleQueue[Happening] = SimpleQueue()
    signals.react_with(happenings.put)  # from here on a stop is passed on to the ranks
    raise_open_file_limit()
    listener = listen(launcher.address, section.ports)
    attempt = begin_attempt(run)
    open_log(run.supervisor_log(attempt.number), attempt=attempt.number)
    ledger = Ledger(run.ledger)
    ledger.record("attempt_started", attempt=attempt.number, ranks=size, **_facts(job))
    secret = Secret.new()
    channel = Channel(
        listener,
        Membership(secret, attempt.number, size),
        FileChannel(run, attempt.number, size),
        happenings.put,
    )
    channel.start()
    durations = Durations.from_ledger(read_lines(run.ledger))
    watch = Watch(attempt, size, section, launcher, channel, ledger, durations, job)
    roster = Roster(run.ranks(attempt.number))
    try:
        control = Control(launcher.address, channel.port, secret)
        launcher.start(Launch(attempt, control), arguments, happenings.put)
        if job is not None:
            job.watch(happenings.put)
        while not watch.over():
            watch.take_in(happenings)
            if insists(watch.signals):
                return _leave_at_once(ledger, attempt)
            watch.enforce()
            roster.update(channel.sightings())
    finally:
        launcher.kill()
        channel.close()
    watch.take_in(happenings, wait=False)
    roster.update(channel.sightings(), now=True)
    decision = decide(watch.ends, stop_requested=watch.stop_reason is not None)
    _close(ledger, attempt, decision, watch.ends)
    if job is not None:
        _part_from(job, watch.job_at_first, decision, run, ledger, attempt)
    return decision.code


def insists(received: Sequence[Received]) -> bool:
    """Whether the user pressed Ctrl-C twice within `INSIST_WITHIN` seconds."""
    times = [r.at for r in received if r.signal == signal.SIGINT]
    return any(later - earlier <= INSIST_WITHIN for earlier, later in pairwise(times))


def _part_from(
    job: SlurmJob,
    first: JobState | None,
    decision: Decision,
    run: RunDirectory,
    ledger: Ledger,
    attempt: Attempt,
) -> None:
    """Put the job back into the queue, or say why not."""
    job.close()
    state = job.state()
    events = list(read_lines(run.ledger))
    step = last_step(events)
    parting = part(decision, first, state, job.batch, fruitless_requeues(events, job.id, step))
    if not parting.requeue:
        if decision.code is ExitCode.STOPPED:
            logger().warning(parting.reason)
            ledger.record("not_requeued", attempt=attempt.number, step=step, reason=parting.reason)
        return
    # Written first: Slurm ends this process with the job's others.
    ledger.record("requeued", attempt=attempt.number, step=step, **_facts(job))
    logger().warning(parting.reason)
    if refusal := job.requeue():
        ledger.record("requeue_refused", attempt=attempt.number, reason=refusal)
        logger().error(f"{refusal}; to go on, submit the same command again")


def _facts(job: SlurmJob | None) -> dict[str, object]:
    """What the ledger keeps about the job in which an attempt runs."""
    if job is None:
        return {}
    restarts = restart_count(os.environ)
    return {"job": job.id, "restarts": restarts, "nodes": os.environ.get("SLURM_JOB_NODELIST")}


def _leave_at_once(ledger: Ledger, attempt: Attempt) -> ExitCode:
    reason = "left at once on the second Ctrl-C; the last commit is intact"
    _close(ledger, attempt, Decision(ExitCode.INTERRUPTED, reason), [])
    return ExitCode.INTERRUPTED


def _close(ledger: Ledger, attempt: Attempt, decision: Decision, exits: Sequence[RankExit]) -> None:
    ledger.record(
        "attempt_ended",
        attempt=attempt.number,
        code=int(decision.code),
        reason=decision.reason,
        culprit=decision.culprit,
        exits={str(e.rank): e.status for e in exits},
    )
    if decision.code is not ExitCode.COMPLETED:
        logger().warning(decision.reason)
