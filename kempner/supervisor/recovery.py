"""What follows an attempt that failed: its last step is salvaged from the ranks' memory; then the
ranks are restarted, the job is requeued, or kempner gives up, with the reason in the ledger and in
the file `GAVE_UP`."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TypeVar

from kempner.checkpoint.format.manifest import FileEntry, Identity, Manifest
from kempner.checkpoint.format.names import CheckpointFolder, in_progress_name
from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.checkpoint.store import commit, retention
from kempner.checkpoint.store.selection import newest
from kempner.cluster.slurm.hostlist import node_of
from kempner.run.output.logs import logger
from kempner.run.process.durable_io import fsync_directory
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.retry import StorageUnavailableError, free_space_helps, storage_waits
from kempner.run.process.signals import insists
from kempner.run.process.threads import AwakeClock, steady_time, unless
from kempner.run.record import gave_up
from kempner.run.record.attempts import Attempt, Fence, read_current
from kempner.run.record.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    NodeSuspected,
    ProgramAdvanced,
    Restarting,
    RunGivenUp,
    SalvageDismissed,
    StepSalvaged,
)
from kempner.run.record.gave_up import FirstFailure, GaveUp
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.context import SupervisorContext
from kempner.supervisor.launchers.base import CannotRestart
from kempner.supervisor.monitors.deadlocks import is_deadlock
from kempner.supervisor.nodes.exclusion import NO_ANSWER
from kempner.supervisor.policy.outcome import Decision, RankExit, is_lost
from kempner.supervisor.policy.restart import (
    FAILURES,
    GO_ON_LATER,
    HEALED_BY_A_RESTART,
    Failure,
    RestartDecision,
    blame_environment,
    decide_restart,
    decide_salvage,
    decide_storage_restart,
    dismissed_steps,
    failed_as_it_stopped,
    find_outage,
    is_salvageable,
    prevents_restart,
    salvage_patience,
    useless_salvage,
)
from kempner.supervisor.preflight import nodes_to_exclude

T = TypeVar("T")


def salvage(context: SupervisorContext, follower: AttemptFollower, decision: Decision) -> None:
    """Make the last step of an attempt that ended with `decision` the newest checkpoint, if all
    ranks hold it in memory. If that fails the step is lost, and the run goes on. Raises
    `SupersededError` if a newer attempt owns the run."""
    wanted = context.program.ours and context.config.checkpoint.in_memory
    if not wanted:
        return
    attempt, history = follower.attempt, context.history
    if not is_salvageable(decision.code, history, attempt.number):
        return
    try:
        patience = context.config.resilience.patience
        seconds = salvage_patience(history, attempt.number, steady_time(), patience)
        too_late = partial(_is_too_late, context, follower, AwakeClock(), seconds)
        if unless(too_late, partial(_salvage, context, attempt), "salvage") is None:
            logger().warning("the steps in memory are not waited for any longer")
    except (OSError, StorageUnavailableError) as error:
        logger().warning("the steps in memory cannot be salvaged", reason=str(error))


def dismiss_useless_salvage(context: SupervisorContext, attempt: Attempt, reached: int) -> None:
    """Set a salvaged step aside if the attempt that resumed from it failed in step `reached`,
    before it made another: then the checkpoint before it is the newest again. Raises as
    `StorageWaits.retry`."""
    history = context.history
    step = useless_salvage(history, attempt.number, reached)
    if step is None:
        return
    folder = _folder(context)
    patient = partial(storage_waits().retry, worked=True, path=folder.path)
    older = [s for s in patient(folder.committed) if s < step]
    if not older:
        return
    patient(Fence(context.run.attempts, attempt).check)
    # Each retried by itself, so that what has succeeded is not done again.
    aside = patient(partial(folder.set_aside, step, "abandoned", attempt.number))
    fence = Fence(context.run.attempts, attempt)
    patient(partial(commit.go_on_from, folder, older[-1], fence, logger().warning))
    patient(partial(fsync_directory, folder.path))
    logger().warning(f"step {step} was salvaged, and did not help: going back to step {older[-1]}")
    event = SalvageDismissed(step, older[-1], aside.name)
    context.ledger.record(event, attempt.number)


def by_the_end(
    context: SupervisorContext, follower: AttemptFollower | None, work: Callable[[], T], name: str
) -> T | None:
    """The result of `work` on storage after the ranks have ended; None, with the work left running,
    once the time is needed to requeue the job. Raises what `work` raises."""
    if follower is None or context.job is None:
        return work()
    done = unless(partial(follower.job.too_late_to_wait, follower.times), work, name)
    if done is None and follower.job.too_late_to_wait(follower.times):
        logger().warning("not waited for, as the job ends", what=name)
    return done


def _is_too_late(
    context: SupervisorContext, follower: AttemptFollower, clock: AwakeClock, seconds: float
) -> bool:
    """Whether to stop waiting for a salvage: storage may hang. The fence stops what is left of it
    once the next attempt begins."""
    over = clock.now() > seconds or follower.job.too_late_to_wait(follower.times)
    return over or insists(context.signals.received) or context.lease.lost


def _salvage(context: SupervisorContext, attempt: Attempt) -> int:
    """Salvage the newest step; the number of steps saved."""
    folder, began = _folder(context), time.monotonic()
    latest = storage_waits().retry(partial(newest, folder), worked=True, path=folder.path)
    offers = context.launcher.offers(attempt.nonce)
    chosen = decide_salvage(offers, latest, dismissed_steps(context.history))
    if chosen.step is None:
        logger().info("nothing is salvaged", reason=chosen.reason)
        return 0
    step, held = chosen.step, [offer for offer in offers if offer.step == chosen.step]
    own = {offer.rank for offer in held if not offer.copied}
    copied = len({offer.rank for offer in held} - own)
    write = partial(_make_checkpoint, context, attempt, folder, step, offers)
    size = storage_waits().retry(write, worked=True, path=folder.path)
    seconds, saved = round(time.monotonic() - began, 3), step - (latest or 0)
    context.ledger.record(CheckpointCommitted(step, size), attempt.number)
    context.ledger.record(StepSalvaged(step, saved, size, seconds, copied), attempt.number)
    steps = "1 step" if saved == 1 else f"{saved} steps"
    logger().warning(
        f"step {step} was saved from memory: {steps} need not be made again", from_buddies=copied
    )
    return saved


def _make_checkpoint(
    context: SupervisorContext,
    attempt: Attempt,
    folder: CheckpointFolder,
    step: int,
    offers: Sequence[Offer],
) -> int:
    """Have the nodes write a step, and commit it; its size in bytes. Raises `OSError`."""
    fence = Fence(context.run.attempts, attempt)
    keep = retention.Keep.of(context.config.checkpoint)
    retention.Pruner(folder, keep, fence).make_room()
    written = folder.path / in_progress_name(step, attempt.number, secrets.token_hex(4))
    try:
        poured = context.launcher.pour(attempt.nonce, step, written)
        missing = {offer.rank for offer in offers} - {each.rank for each in poured}
        if missing:
            raise FileNotFoundError(f"ranks {sorted(missing)} are not held in memory any more")
        manifest = _manifest(poured, attempt)
        commit.commit(folder, written, manifest, fence, logger().warning)
    except OSError:
        retention.discard(written)
        raise
    return sum(entry.bytes for entry in manifest.files.values())


def _manifest(poured: Sequence[Poured], attempt: Attempt) -> Manifest:
    first = next(each for each in poured if each.train_state is not None)
    assert first.train_state is not None
    files: Mapping[str, FileEntry] = {
        name: entry for each in poured for name, entry in each.files.items()
    }
    identity = Identity.from_fields(first.identity)
    return Manifest(first.train_state, identity, attempt.number, time.time(), files)


def _folder(context: SupervisorContext) -> CheckpointFolder:
    given = context.config.checkpoint.dir
    return CheckpointFolder(Path(given) if given else context.run.checkpoints)


_ADVICE: Mapping[ExitCode, str] = {
    ExitCode.CRASHED: "fix what the exception or the signal points to",
    ExitCode.PEERS_LOST: "look at the nodes and at the network between them",
    ExitCode.HUNG: "look in the stacks for what each rank was waiting for",
    ExitCode.BAD_DATA: "repair or replace the data or checkpoint named above",
    ExitCode.STORAGE_UNAVAILABLE: "see to the storage named above",
    ExitCode.CHECKPOINT_FAILED: "see why checkpoint.dir could not be written to",
    ExitCode.DIVERGED: "lower optimizer.lr, or look at the data named above",
}

_IN_ORDER = "have all ranks of a process group call the same collectives in the same order"


def give_up(
    run: RunDirectory,
    ledger: Ledger,
    attempt: Attempt,
    decision: Decision,
    failure: Failure,
    node: str,
    mark: bool = True,
) -> GaveUp:
    """Record in the ledger and in the run's directory why kempner gives up; the record.

    `decision.reason` is why, `node` the host of the rank that failed first. Without `mark`, no
    `GAVE_UP` is written, so another start is possible. Nothing is recorded for a run that a newer
    attempt has taken over."""
    rank = decision.culprit
    advice = _IN_ORDER if is_deadlock(failure.raised) else _advise(decision)
    verdict = GaveUp(
        code=decision.code,
        reason=decision.reason,
        attempt=attempt.number,
        first=None if rank is None else FirstFailure(rank, failure.step, node, failure.raised),
        see=[str(path) for path in evidence(run, attempt.number, rank)],
        advice=f"{advice}; then delete {run.gave_up}, and start again",
    )
    try:
        if read_current(run.attempts) != attempt:
            return verdict
        if mark:
            gave_up.write(run, verdict)
        else:
            verdict = replace(verdict, advice=f"{advice}; then start again")
    except OSError as error:
        logger().warning("cannot be written", file=str(run.gave_up), error=error.strerror)
        verdict = replace(verdict, advice=f"{advice}; then start again")
    ledger.record(RunGivenUp.from_fields(verdict.fields()), attempt.number)
    return verdict


def _advise(decision: Decision) -> str:
    if decision.code is ExitCode.CHECKPOINT_FAILED and free_space_helps(decision.reason):
        return "free disk space or raise the quota"
    return _ADVICE[decision.code]


def evidence(run: RunDirectory, attempt: int, rank: int | None) -> list[Path]:
    """The log, output and stacks of the rank that failed first; without one, the supervisor's
    log."""
    if rank is None:
        return [run.supervisor_log(attempt)]
    kinds = (run.log(attempt, rank), run.output(attempt, rank), run.stacks(attempt, rank))
    return [path for path in kinds if path.exists()]


BEGINS_WITHIN = 30.0
"""A program that fails within these seconds without a report has not begun to train."""

GIVEN_BACK_WITHIN = 30.0
"""Seconds before a requeue for Slurm to notice that a lost node does not respond; it takes about
twelve."""

LONG = 60.0
"""Seconds after which a program that reports no steps counts as having worked."""


def restart_or_finish(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    earlier: Sequence[Failure],
) -> Decision | None:
    """Get ready to start again after an attempt; if that makes no sense, how the run ends."""
    if decision.code is ExitCode.USAGE:
        decision = blame_environment(decision, _has_worked(context.history, earlier))
    why = follower.stop.reason
    if decision.code is ExitCode.STOPPED and (
        why.changes_nodes or (not context.signals.received and context.growth.explains(why))
    ):
        return _start_on_others(context, follower, decision)
    # A program that reports nothing may have got the signal before the stop was known here.
    healed = decision.code in HEALED_BY_A_RESTART and not decision.final
    stops = why.ends_run
    if stops and (decision.environment or (healed and follower.reports_nothing)):
        return replace(decision, code=ExitCode.STOPPED)
    if decision.code not in FAILURES or (stops and not _goes_on_later(context, decision)):
        return decision
    attempt, failure = follower.attempt, _failure(context, follower, decision)
    host = follower.roster.host_of(decision.culprit)
    launcher = context.launcher
    node = node_of(host, launcher.nodes.all) if host else launcher.node_of(decision.culprit)
    context.ledger.record(AttemptFailed(node=node, **asdict(failure)), attempt.number)
    verdict = _decide_restart(context, decision, failure, earlier)
    if stops and (later := failed_as_it_stopped(decision, verdict)) is not None:
        return later
    bad = {} if stops else _better_without(context, follower, decision, node, verdict)
    if not (verdict.again or bad):
        final = replace(decision, reason=verdict.reason)
        return _end_after(context, follower, final, failure, node, earlier)
    if _comes_back(context) and follower.too_late_to_restart():
        reason = f"{decision.reason}; too little of the job's time is left to start again in it"
        return replace(decision, code=ExitCode.STOPPED, reason=reason)
    end = _start_again(context, follower, decision, verdict, bad)
    if end is None:
        dismiss_useless_salvage(context, attempt, failure.step)
    return end


def _goes_on_later(context: SupervisorContext, decision: Decision) -> bool:
    """Whether the job comes back after a failure during a stop, which it then need not meet."""
    comes_back = _comes_back(context) and not context.lease.stop_asked
    return comes_back and decision.code in GO_ON_LATER


def _end_after(
    context: SupervisorContext,
    follower: AttemptFollower,
    final: Decision,
    failure: Failure,
    node: str,
    earlier: Sequence[Failure],
) -> Decision:
    """How the run ends after its last failure: if storage is unavailable, the job continues later;
    else kempner gives up."""
    if final.code is ExitCode.STORAGE_UNAVAILABLE and _comes_back(context):
        return final
    mark = prevents_restart(failure, earlier, _ran_for_long(context, follower))
    record = give_up(context.run, context.ledger, follower.attempt, final, failure, node, mark)
    return replace(final, reason=str(record))


def _has_worked(history: RunHistory, earlier: Sequence[Failure]) -> bool:
    stepped = history.last_step is not None or any(failure.step for failure in earlier)
    return stepped or bool(history.events(ProgramAdvanced))


def _ran_for_long(context: SupervisorContext, follower: AttemptFollower) -> bool:
    """Whether an attempt of a program that reports nothing ran long enough to have made steps."""
    if not follower.reports_nothing:
        return False
    started = context.history.entries(AttemptStarted)
    return bool(started) and steady_time() - started[-1].time > LONG


def _start_again(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    verdict: RestartDecision,
    bad: Mapping[str, str],
) -> Decision | None:
    """Get ready to restart in this job; how the run ends here if it cannot, or if the job had
    better be requeued without the nodes `bad`."""
    attempt, nodes = follower.attempt, context.launcher.nodes
    before = nodes.all
    unable = _prepare_again(context, follower, 0.0 if bad else verdict.pause)
    context.lease.check()
    if unable is None and is_asked_to_stop(context, follower):
        return replace(decision, code=ExitCode.STOPPED, reason=f"{decision.reason}; stopped")
    gone_nodes = set(before) - set(nodes.all) - nodes.joined.keys()
    for gone in sorted(gone_nodes - follower.roster.stuck_pids().keys() - context.departures.left):
        context.ledger.record(NodeSuspected(gone, NO_ANSWER), attempt.number)
    if unable is not None:
        return replace(decision, reason=unable.reason, bad_nodes=unable.nodes)
    if bad:
        reason = "; ".join(f"{name} is suspect: {why}" for name, why in bad.items())
        return replace(decision, reason=reason, bad_nodes=tuple(bad))
    logger().warning(verdict.reason)
    context.ledger.record(Restarting(verdict.reason), attempt.number)
    context.growth.take_back(context.ledger, attempt)  # a restart is due anyway
    return None


def _start_on_others(
    context: SupervisorContext, follower: AttemptFollower, decision: Decision
) -> Decision | None:
    """Get ready to restart on other nodes of this job; how the run ends here if it cannot."""
    unable = _prepare_again(context, follower, 0.0)
    context.lease.check()
    if unable is None and is_asked_to_stop(context, follower):
        return replace(decision, reason="stopped; start again to continue")
    if unable is not None:
        return replace(decision, reason=unable.reason, bad_nodes=unable.nodes)
    context.growth.take_back(context.ledger, follower.attempt)
    return None


def _prepare_again(
    context: SupervisorContext, follower: AttemptFollower, pause: float
) -> CannotRestart | None:
    """Have the launcher get ready for another start, `pause` seconds from now. Stops waiting for it
    if a stop is requested."""
    lost, stuck = follower.roster.lost_hosts(), follower.roster.stuck_pids()
    launcher = context.launcher
    before = set(launcher.nodes.all)

    def prepare() -> CannotRestart | None:
        time.sleep(pause)
        unable = launcher.prepare_again(lost, stuck)
        gone = before - set(launcher.nodes.all) - launcher.nodes.joined.keys()
        if context.job is not None:
            # Else a requeued job would wait for a node that Slurm takes for healthy.
            waits = unable is not None and not gone <= set(stuck)
            context.job.leave(gone, GIVEN_BACK_WITHIN if waits else 0.0)
        return context.departures.leave(follower.attempt, unable)

    return unless(partial(is_asked_to_stop, context, follower), prepare, "prepare")


def is_asked_to_stop(context: SupervisorContext, follower: AttemptFollower | None) -> bool:
    """Whether to begin no other attempt: a stop was requested, the lease is lost, or the job's time
    is over."""
    if context.signals.received or context.lease.lost:
        return True
    return follower is not None and follower.must_stop()


def _decide_restart(
    context: SupervisorContext, decision: Decision, failure: Failure, earlier: Sequence[Failure]
) -> RestartDecision:
    """Whether to start again; `earlier` are the failures before, except those of storage."""
    if decision.code is ExitCode.STORAGE_UNAVAILABLE:
        now, history = time.monotonic(), context.history
        before = context.outages[0] if context.outages else None
        outage = find_outage(history, failure.committed, before, now)
        context.outages[:] = [outage]
        return decide_storage_restart(decision, outage, now, context.config.resilience.patience)
    budget = context.config.supervise.max_restarts_without_progress
    return decide_restart(decision, failure, earlier, budget)


def _better_without(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    node: str,
    verdict: RestartDecision,
) -> dict[str, str]:
    """Nodes to exclude when the job is requeued, each with a reason; empty if it cannot be
    requeued, or if the same failure would follow it everywhere."""
    job = context.job
    if job is None or not _comes_back(context):
        return {}
    if not verdict.again and decision.code is not ExitCode.CHECKPOINT_FAILED:
        return {}
    launcher, history, config = context.launcher, context.history, context.config
    bad = nodes_to_exclude(launcher, node, history, config, decision, verdict.last)
    # If the environment is at fault these nodes are unusable, even if the job has to wait.
    return bad if bad and (decision.environment or job.has_other_nodes(list(bad))) else {}


def _comes_back(context: SupervisorContext) -> bool:
    """Whether the job can be requeued, as far as Slurm has reported it at any time."""
    return context.job is not None and context.job.comes_back


def _failure(context: SupervisorContext, follower: AttemptFollower, decision: Decision) -> Failure:
    culprit = next((end for end in follower.ends if end.rank == decision.culprit), None)
    raised = culprit.raised if culprit is not None else ""
    if follower.reports_nothing and not follower.steps_done and not _begins(follower):
        raised = ""  # it may have made many steps, so the same error twice proves nothing
    if decision.code is ExitCode.HUNG and follower.evidence.hang is not None:
        raised = raised or follower.evidence.hang.deadlock
    return Failure(
        # The last report of a rank that was killed is old; the others reported as they exited.
        step=follower.step_of(decision.culprit if raised else None),
        committed=context.history.last_step,
        raised=raised,
        node_lost=decision.environment or (culprit is not None and is_lost(culprit)),
        code=int(decision.code),
        unstarted=_unstarted(follower, culprit),
    )


def _unstarted(follower: AttemptFollower, culprit: RankExit | None) -> int | None:
    """The exit status of a user's program that failed by itself, without a report, so soon that it
    cannot have begun to train: an import failed, say."""
    if culprit is None or not follower.reports_nothing or follower.steps_done:
        return None
    exited = culprit.status is not None and culprit.status > 0
    return culprit.status if exited and _begins(follower) else None


def _begins(follower: AttemptFollower) -> bool:
    """Whether the first rank ended before a program that reports nothing can have begun to
    train."""
    return follower.seconds_run() < BEGINS_WITHIN
