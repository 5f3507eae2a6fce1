"""The daemon: runs one attempt after another, passes stops on, and decides how the run ends."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from functools import partial
from queue import SimpleQueue

from kempner.cluster.machine import leave_no_cores, raise_open_file_limit
from kempner.cluster.slurm.job import restart_count
from kempner.config.sections import Config
from kempner.run.control.launch_env import BuddyTerms, Launch, SupervisorMark
from kempner.run.control.leftovers import end_leftovers
from kempner.run.link.auth import Secret
from kempner.run.output.logs import logger, open_log
from kempner.run.process.exit_codes import ExitCode, RunError
from kempner.run.process.retry import (
    StorageUnavailableError,
    StorageWait,
    WaitStoppedError,
    storage_waits,
)
from kempner.run.process.signals import LEFT_AT_ONCE, ReceivedSignal, SignalInbox, insists
from kempner.run.process.threads import unless
from kempner.run.record.attempts import (
    Attempt,
    SupersededError,
    begin_attempt,
    prune_attempts,
)
from kempner.run.record.events import AttemptEnded, AttemptStarted, ProgramAdvanced, StorageWaited
from kempner.run.record.gave_up import refuse_if_given_up
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import Lease
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.attempt import AttemptEvent, AttemptFollower, UserStopSignal
from kempner.supervisor.context import SupervisorContext
from kempner.supervisor.control.program_reports import ProgramReports
from kempner.supervisor.control.rank_connections import (
    RankChannel,
    RankRoster,
    RankStatusFile,
    StartProgress,
)
from kempner.supervisor.hooks import Hooks, LedgerWithHooks, MetricsExports
from kempner.supervisor.launchers.base import Program
from kempner.supervisor.launchers.launcher import Launcher
from kempner.supervisor.monitors.base import RunTimes
from kempner.supervisor.nodes.exclusion import known_suspects
from kempner.supervisor.policy.outcome import (
    Decision,
    ReportedLoop,
    after_training,
    decide_outcome,
    ended_by_signal,
    has_advanced,
    left_early,
)
from kempner.supervisor.policy.restart import (
    FAILURES,
    RESUMES_ELSEWHERE,
    failures,
    killed_starts,
    requeues_without_progress,
    why_not_kept,
)
from kempner.supervisor.preflight import choose_nodes
from kempner.supervisor.readiness import (
    await_script,
    check_ready,
    check_run_directory,
    keep_accepted,
)
from kempner.supervisor.recovery import by_the_end, is_asked_to_stop, restart_or_finish, salvage
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobView
from kempner.supervisor.slurm.requeue_job import end_without_requeue, job_facts, requeue_or_explain
from kempner.supervisor.watchdog.board import board

NOT_KEPT = "checkpoint.in_memory=true is for `kempner train`; this program's steps are not kept"

STORAGE_FAILED = (StorageUnavailableError, WaitStoppedError)
"""Raised when retries on storage end without success."""


def supervise(
    run: RunDirectory,
    launcher: Launcher,
    program: Program,
    config: Config,
    signals: SignalInbox,
    job: JobMonitor | None = None,
) -> ExitCode:
    """Start the ranks, and restart them when they fail, until the run or its time on these nodes is
    over; the run's exit code.

    Raises `GaveUpError` if the run was given up before, `UsageError` if it has a supervisor
    already, `SupersededError` when another one takes it over, and as `check_ready`."""
    storage_waits().configure(config.resilience.patience, lambda: bool(signals.received))
    raise_open_file_limit()
    leave_no_cores()
    check_run_directory(run)
    os.environ |= SupervisorMark(secrets.token_hex(6), run.path).variables()
    hooks = Hooks(config.hooks, run)
    try:
        return _supervise(run, launcher, program, config, signals, job, hooks)
    finally:
        _end("ending the ranks", launcher.close)
        _end("waiting for the hooks", hooks.close)


def _end(stage: str, do: Callable[[], None]) -> None:
    """Run one stage of the end of a run; an error is logged, so that the next stages follow."""
    try:
        do()
    except Exception as error:  # noqa: BLE001 - logged; the stages that are left must follow
        logger().warning(f"{stage} failed at the end of the run", error=repr(error))


def _supervise(
    run: RunDirectory,
    launcher: Launcher,
    program: Program,
    config: Config,
    signals: SignalInbox,
    job: JobMonitor | None,
    hooks: Hooks,
) -> ExitCode:
    try:
        refuse_if_given_up(run)
        launcher.prepare(program)
        _brief_watchdog(run, job)
        if program.ours:
            for warning in check_ready(config, run).warnings:
                logger().warning(warning)
        elif config.checkpoint.in_memory:
            logger().warning(NOT_KEPT)
        lease = Lease.acquire(run, config.supervise.lease, restart_count(os.environ))
        keep_accepted(run, config)
    except STORAGE_FAILED as error:
        _end("ending the ranks", launcher.close)
        end = Decision(error.code, str(error))
        ledger = LedgerWithHooks(run.ledger, hooks)
        return _leave(end, run, ledger, RunHistory(), job, None, {})
    exports, code = MetricsExports(), None
    try:
        end_leftovers(run, config.supervise.stop_grace, lambda: bool(signals.received))
        exports.start(run, config.metrics)
        if program.ours and config.supervise.grow:
            launcher.invite(run.invitation)
        context = SupervisorContext(run, launcher, program, config, signals, job, lease, hooks)
        code = _bring_to_an_end(context)
        return code
    finally:
        complete = code is ExitCode.COMPLETED
        # After the requeue of the job, which comes first.
        _end("ending the exporters", lambda: exports.close(complete))
        _end("releasing the lease", lease.release)


def _brief_watchdog(run: RunDirectory, job: JobMonitor | None) -> None:
    """Give the watchdog what it needs if this process is killed before its first attempt."""
    if job is None or not job.batch:
        return
    history = storage_waits().retry(partial(RunHistory.read, run.ledger))
    killed = killed_starts(history, job.id)
    board().tell_launch(killed, history.last_step, str(run.ledger.absolute()))


def _bring_to_an_end(context: SupervisorContext) -> ExitCode:
    end, follower = None, None
    while end is None:
        try:
            follower, decision = _follow_attempt(context)
            by_the_end(context, follower, context.lease.check, "lease")
            salvage(context, follower, decision)
            failed = decision.code in (*FAILURES, ExitCode.USAGE)
            earlier = failures(context.history) if failed else ()
            end = restart_or_finish(context, follower, decision, earlier)
        except STORAGE_FAILED as error:
            end = Decision(error.code, str(error))
        except SupersededError:
            board().settle()  # another supervisor has the run, so this job must not be requeued
            raise
        except RunError:
            raise  # with an exit code of its own
        except Exception as error:  # noqa: BLE001 - the ranks have saved, so the run can go on
            end = _own_fault(context, error)
    if (end.code not in RESUMES_ELSEWHERE and not end.bad_nodes) or context.lease.stop_asked:
        board().settle()
    # Before the requeue, which would kill what is left of the job.
    _end("ending the ranks", context.launcher.close)
    # If it has not been read by now, storage does not answer.
    history = context.history if "history" in vars(context) else RunHistory()
    job, suspect = context.job, None
    if job is not None and context.lease.stop_asked:
        end_without_requeue(
            job, context.ledger, history, 0 if follower is None else follower.attempt.number
        )
        job = None
    elif job is not None:
        look = partial(known_suspects, history, context.config.resilience, context.run.path.name)
        suspect = by_the_end(context, follower, look, "suspects")
    return _leave(end, context.run, context.ledger, history, job, follower, suspect or {})


def _own_fault(context: SupervisorContext, error: Exception) -> Decision:
    logger().error("the supervisor has failed", exc_info=True)
    reason = f"the supervisor has failed: {type(error).__name__}: {error}"
    batch = context.job is not None and context.job.batch
    return Decision(ExitCode.STOPPED if batch else ExitCode.CRASHED, reason)


def _leave(
    end: Decision,
    run: RunDirectory,
    ledger: Ledger,
    history: RunHistory,
    job: JobMonitor | None,
    follower: AttemptFollower | None,
    suspect: Collection[str],
) -> ExitCode:
    """Requeue the job if that makes sense, and log how the run ends. `follower` is that of the last
    attempt, if there was one."""
    if job is not None:
        first, number, since = None, 0, None
        if follower is not None:
            first, number = follower.job.at_first, follower.attempt.number
            since = follower.times.seconds_since_left
        requeue_or_explain(job, first, number, end, run, ledger, history, suspect, since)
    if end.code is not ExitCode.COMPLETED or end.left_at is not None:
        logger().warning(end.reason)
    return end.code


def _record_wait(ledger: Ledger, attempt: Attempt, waited: StorageWait) -> None:
    ledger.record(StorageWaited(**asdict(waited)), attempt.number)


def _follow_attempt(context: SupervisorContext) -> tuple[AttemptFollower, Decision]:
    launcher, signals = context.launcher, context.signals
    incoming: SimpleQueue[AttemptEvent] = SimpleQueue()

    def pass_on(received: ReceivedSignal) -> None:
        incoming.put(UserStopSignal(received) if context.lease.stop_asked else received)

    signals.react_with(pass_on)  # from now on, stops go to the ranks
    attempt, secret, size = _begin(context), Secret.new(), launcher.nodes.allocation.size
    program = None
    if not context.program.ours:
        program = ProgramReports(context.run, attempt.number, size, context.config.program)
        program.start()
    channel = RankChannel(attempt.number, size, incoming.put, launcher.tell_ranks, program)
    follower = _follower(context, attempt, channel)
    in_memory = _keeps_steps(context)
    buddy = _buddy_terms(context.config) if in_memory else None
    launch = Launch(attempt, secret, terms=context.terms(), in_memory=in_memory, buddy=buddy)
    try:
        _run_attempt(context, follower, channel, launch, incoming)
    finally:
        if program is not None:
            program.close()
    decision = _outcome(follower)
    follower.tell_phase_durations()
    statuses, ending = {str(e.rank): e.status for e in follower.ends}, follower.seconds_ending()
    seconds = None if ending is None else round(ending, 3)
    what = int(decision.code), decision.reason, decision.culprit
    ended = AttemptEnded(*what, statuses, seconds, decision.left_at)
    context.ledger.record(ended, attempt.number)
    # Once per attempt: until the next end, only this process adds to the ledger.
    by_the_end(context, follower, context.history.refresh, "ledger")
    if program is not None and follower.reports_nothing:
        note = partial(_note_advance, context, follower, program.furthest_step)
        by_the_end(context, follower, note, "advance")
    return follower, decision


def _keeps_steps(context: SupervisorContext) -> bool:
    wanted = context.program.ours and context.config.checkpoint.in_memory
    refusal = why_not_kept(wanted, context.history, context.began or 0.0)
    if refusal is not None:
        logger().warning("steps are not kept in memory any more", reason=refusal)
    return wanted and refusal is None


def _buddy_terms(config: Config) -> BuddyTerms | None:
    if not config.checkpoint.buddy:
        return None
    return BuddyTerms(config.checkpoint.buddy_share, config.distributed.interface)


def _note_advance(context: SupervisorContext, follower: AttemptFollower, step: int | None) -> None:
    earlier = context.history.events(ProgramAdvanced)
    before = max((event.step for event in earlier if event.step is not None), default=None)
    seconds, long = follower.seconds_run(), context.config.program.progress_seconds
    if has_advanced(step, before, seconds, follower.stop.reason.ends_run, long):
        context.ledger.record(ProgramAdvanced(step, round(seconds, 1)), follower.attempt.number)


def _begin(context: SupervisorContext) -> Attempt:
    """Begin the next attempt, and choose its nodes."""
    run, launcher, ledger = context.run, context.launcher, context.ledger
    context.lease.check()
    container = context.config.slurm.container
    if not (context.program.ours or container.image or container.prefix):
        await_script(context.program.words, run)
    attempt = begin_attempt(run, worked=True)  # the lease is in the same folder
    storage_waits().tell_to(partial(_record_wait, ledger, attempt))
    open_log(run.supervisor_log(attempt.number), attempt=attempt.number)
    patient = partial(unless, partial(is_asked_to_stop, context, None), name="survey")
    history, clock = context.history, context.clock
    choose_nodes(launcher, attempt, run, context.config, ledger, history, patient, clock)
    context.growth.note_changes(ledger, attempt)
    own = not context.program.ours
    event = AttemptStarted(
        launcher.nodes.allocation.size, own_program=own, process_began=context.began
    )
    if context.job is not None:
        job, restarts, nodes = job_facts(context.job)
        event = replace(event, job=job, restarts=restarts, nodes=nodes)
    ledger.record(event, attempt.number)
    if context.job is not None and context.job.batch:
        fruitless = requeues_without_progress(history, context.job.id, history.last_step)
        board().tell_attempt(attempt.number, fruitless, str(run.ledger.absolute()))
        if history.last_step is not None:
            board().tell_step(history.last_step, new=False)
    return attempt


def _follower(
    context: SupervisorContext, attempt: Attempt, channel: RankChannel
) -> AttemptFollower:
    size = context.launcher.nodes.allocation.size
    return AttemptFollower(
        attempt,
        RankRoster(size, must_report=context.program.ours),
        context.config,
        context.launcher,
        channel,
        context.ledger,
        JobView(context.job),
        RunTimes.from_history(context.history, size),
    )


def _run_attempt(
    context: SupervisorContext,
    follower: AttemptFollower,
    channel: RankChannel,
    launch: Launch,
    incoming: SimpleQueue[AttemptEvent],
) -> None:
    rank_status = RankStatusFile(context.run.ranks(launch.attempt.number))
    last_step, ours = context.history.last_step, context.program.ours
    progress = StartProgress(context.launcher.nodes.allocation.size, last_step, ours)
    try:
        context.launcher.start(launch, context.program, incoming.put, channel)
        prune_attempts(context.run, context.config.supervise.keep_attempts)
        if context.job is not None:
            context.job.watch(incoming.put)
        context.growth.watch(launch.attempt, context.history)
        while not (follower.life.over or insists(follower.stop.signals) or context.lease.lost):
            follower.take_in(incoming)
            follower.enforce()
            context.departures.consider(follower)
            context.growth.consider(follower)
            reports = channel.last_reports()
            rank_status.update(reports)
            progress.update([last.report.phase for last in reports.values()])
    finally:
        context.launcher.kill()
        context.growth.end_watch()
        progress.close(clean=any(end.rank == 0 and (end.status or 0) >= 0 for end in follower.ends))
    # Else what follows could go into another supervisor's ledger.
    by_the_end(context, follower, context.lease.check, "lease")
    follower.take_in(incoming, wait=False)
    rank_status.update(channel.last_reports(), now=True)


def _outcome(follower: AttemptFollower) -> Decision:
    if insists(follower.stop.signals):
        return Decision(ExitCode.INTERRUPTED, LEFT_AT_ONCE)
    decision = decide_outcome(follower.ends, stop_requested=follower.stop.reason)
    if (hang := follower.evidence.hang) is not None and not follower.stop.reason:
        decision = Decision(ExitCode.HUNG, hang.sentence, hang.laggard)
    if follower.stop.loop is ReportedLoop.COMPLETE:
        return after_training(decision, follower.ends)
    if decision.code is not ExitCode.COMPLETED:
        return decision
    under_way = follower.stop.loop is ReportedLoop.UNDER_WAY
    if (under_way or follower.left_with_0_alone) and follower.was_signalled:
        return ended_by_signal(decision, follower.stop.reason)
    return left_early(decision, follower.steps_done) if under_way else decision
