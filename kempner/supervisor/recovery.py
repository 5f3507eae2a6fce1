"""What is done after an attempt failed: start the ranks again, leave the machine, or give up.

Gives up on a run: writes the reason to the ledger and to the file `GAVE_UP`.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

from kempner.cluster.slurm.hostlist import node_of
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.retry import free_space_helps
from kempner.run.process.threads import unless
from kempner.run.record import gave_up
from kempner.run.record.attempts import Attempt, read_current
from kempner.run.record.events import (
    AttemptFailed,
    AttemptStarted,
    NodeSuspected,
    ProgramAdvanced,
    Restarting,
    RunGivenUp,
)
from kempner.run.record.gave_up import FirstFailure, GaveUp
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.context import SupervisorContext
from kempner.supervisor.launchers.base import CannotRestart
from kempner.supervisor.nodes.health_check import NO_ANSWER
from kempner.supervisor.policy.outcome import Decision, RankExit, is_lost
from kempner.supervisor.policy.restart import (
    FAILURES,
    HEALED_BY_A_RESTART,
    Failure,
    RestartDecision,
    as_it_worked_before,
    decide_restart,
    decide_storage_restart,
    find_outage,
    prevents_restart,
)
from kempner.supervisor.preflight import nodes_to_exclude
from kempner.supervisor.salvage import dismiss_if_in_vain

_ADVICE: Mapping[ExitCode, str] = {
    ExitCode.CRASHED: "fix what the exception or the signal points to",
    ExitCode.PEERS_LOST: "look at the nodes and at the network between them",
    ExitCode.HUNG: "look in the stacks for what each rank was waiting for",
    ExitCode.BAD_DATA: "repair or replace the data or checkpoint named above",
    ExitCode.STORAGE_UNAVAILABLE: "see to the storage named above",
    ExitCode.CHECKPOINT_FAILED: "see why checkpoint.dir could not be written to",
    ExitCode.DIVERGED: "lower optimizer.lr, or look at the data named above",
}


def give_up(
    run: RunDirectory,
    attempt: Attempt,
    decision: Decision,
    failure: Failure,
    node: str,
    mark: bool = True,
) -> GaveUp:
    """Record in the ledger and in the run's directory why kempner gives up; returns the record.

    `decision.reason` is why, `node` the host of the rank that failed first. Without `mark` another
    start is not prevented. A run that a newer attempt has taken over is not marked: it is not over.
    """
    rank = decision.culprit
    verdict = GaveUp(
        code=decision.code,
        reason=decision.reason,
        attempt=attempt.number,
        first=None if rank is None else FirstFailure(rank, failure.step, node, failure.raised),
        see=[str(path) for path in evidence(run, attempt.number, rank)],
        advice=f"{_advise(decision)}; then delete {run.gave_up}, and start again",
    )
    try:
        if read_current(run.attempts) != attempt:
            return verdict
        if mark:
            gave_up.write(run, verdict)
        else:
            verdict = replace(verdict, advice=f"{_advise(decision)}; then start again")
    except OSError as error:
        logger().warning("cannot be written", file=str(run.gave_up), error=error.strerror)
        verdict = replace(verdict, advice=f"{_advise(decision)}; then start again")
    Ledger(run.ledger).record(RunGivenUp.from_fields(verdict.fields()), attempt.number)
    return verdict


def _advise(decision: Decision) -> str:
    """What to do about it."""
    if decision.code is ExitCode.CHECKPOINT_FAILED and free_space_helps(decision.reason):
        return "free disk space or raise the quota"
    return _ADVICE[decision.code]


def evidence(run: RunDirectory, attempt: int, rank: int | None) -> list[Path]:
    """The files that tell more about the rank that failed first, or the supervisor's own log."""
    if rank is None:
        return [run.supervisor_log(attempt)]
    kinds = (run.log(attempt, rank), run.output(attempt, rank), run.stacks(attempt, rank))
    return [path for path in kinds if path.exists()]


BEGINS_WITHIN = 30.0
"""Seconds within which a program that fails before it has said a word has not begun."""

LONG = 60.0
"""Seconds after which a program of whose steps nothing is known counts as one that has worked."""


def restart_or_finish(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    earlier: Sequence[Failure],
) -> Decision | None:
    """Get ready to start again after a failure; how the run ends if that makes no sense."""
    history = context.history.refresh()
    worked = history.last_step is not None or any(f.step for f in earlier)
    worked = worked or bool(history.events(ProgramAdvanced))
    decision = as_it_worked_before(decision, worked)
    if decision.code is ExitCode.STOPPED and _changes_nodes(context, follower):
        return _start_on_others(context, follower, decision)
    stops = follower.stop_reason.ends_run
    if stops and (decision.environment or _may_pass(follower, decision)):
        return replace(decision, code=ExitCode.STOPPED)
    if decision.code not in FAILURES or stops:
        return decision
    attempt, failure = follower.attempt, _failure(context, follower, decision)
    node = node_of(follower.roster.host_of(decision.culprit), context.launcher.nodes)
    context.ledger.record(AttemptFailed(node=node, **asdict(failure)), attempt.number)
    verdict = _decide_restart(context, decision, failure, earlier)
    bad = _better_without(context, follower, decision, node, verdict)
    if not (verdict.again or bad):
        if decision.code is ExitCode.STORAGE_UNAVAILABLE and _may_come_back(context):
            return replace(decision, reason=verdict.reason)
        final = replace(decision, reason=verdict.reason)
        mark = prevents_restart(failure, earlier, _ran_for_long(context, follower))
        said = give_up(context.run, attempt, final, failure, node, mark)
        return replace(final, reason=str(said))
    if _may_come_back(context) and follower.too_late_to_restart():
        reason = f"{decision.reason}; too little of the job's time is left to start again in it"
        return replace(decision, code=ExitCode.STOPPED, reason=reason)
    end = _start_again(context, follower, decision, verdict, bad)
    if end is None:
        dismiss_if_in_vain(context, attempt, failure.step)
    return end


def _may_pass(follower: AttemptFollower, decision: Decision) -> bool:
    """Whether a failure of a program that does not report may follow from the stop: a rank may have
    been signalled before the stop and its reason were known here, and failed because of it."""
    healed = decision.code in HEALED_BY_A_RESTART and not decision.final
    return healed and follower.reports_nothing


def _ran_for_long(context: SupervisorContext, follower: AttemptFollower) -> bool:
    """Whether an attempt of a program that does not report its steps may have made some."""
    if not follower.reports_nothing:
        return False
    started = context.history.refresh().entries(AttemptStarted)
    return bool(started) and time.time() - started[-1].time > LONG


def _start_again(
    context: SupervisorContext,
    follower: AttemptFollower,
    decision: Decision,
    verdict: RestartDecision,
    bad: Mapping[str, str],
) -> Decision | None:
    """Get ready to start once more, here; how the run ends here if it cannot, or had better not."""
    attempt, before = follower.attempt, context.launcher.nodes
    unable = _prepare_again(context, follower, 0.0 if bad else verdict.pause)
    context.lease.check()
    if unable is None and is_asked_to_stop(context, follower):
        return replace(decision, code=ExitCode.STOPPED, reason=f"{decision.reason}; stopped")
    gone_nodes = set(before) - set(context.launcher.nodes) - context.launcher.joined.keys()
    for gone in sorted(gone_nodes - follower.roster.stuck_hosts):
        context.ledger.record(NodeSuspected(gone, NO_ANSWER), attempt.number)
    if unable is not None:
        return replace(decision, reason=unable.reason, bad_nodes=unable.nodes)
    if bad:
        reason = "; ".join(f"{name} is suspect: {why}" for name, why in bad.items())
        return replace(decision, reason=reason, bad_nodes=tuple(bad))
    logger().warning(verdict.reason)
    context.ledger.record(Restarting(verdict.reason), attempt.number)
    context.growth.take_back(context.ledger, attempt)  # it costs nothing now
    return None


def _changes_nodes(context: SupervisorContext, follower: AttemptFollower) -> bool:
    """Whether the ranks have stopped to go on at once, on more nodes or fewer."""
    reason = follower.stop_reason
    return reason.changes_nodes or (
        not context.signals.received and context.growth.explains(reason)
    )


def _start_on_others(
    context: SupervisorContext, follower: AttemptFollower, decision: Decision
) -> Decision | None:
    """Get ready to start on other nodes, here; how the run ends here if it cannot."""
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
    """Have the launcher get ready once more, `pause` seconds from now.

    It is left to itself if a stop is asked for meanwhile.
    """
    lost, stuck = follower.roster.lost_hosts(), follower.roster.stuck_pids()

    def prepare() -> CannotRestart | None:
        time.sleep(pause)
        return context.launcher.prepare_again(lost, stuck)

    return unless(partial(is_asked_to_stop, context, follower), prepare, "prepare")


def is_asked_to_stop(context: SupervisorContext, follower: AttemptFollower | None) -> bool:
    """Whether, between two attempts, there is a reason to begin no other one."""
    if context.signals.received or context.lease.lost:
        return True
    return follower is not None and follower.must_stop()


def _decide_restart(
    context: SupervisorContext, decision: Decision, failure: Failure, earlier: Sequence[Failure]
) -> RestartDecision:
    """Whether to start again; `earlier` are the failures before, but for those of storage."""
    if decision.code is ExitCode.STORAGE_UNAVAILABLE:
        now, history = time.time(), context.history.refresh()
        outage = find_outage(history, failure.committed, now)
        patience = context.config.resilience.patience
        return decide_storage_restart(decision, outage, now, patience)
    budget = context.config.supervise.max_restarts_without_progress
    return decide_restart(decision, failure, earlier, budget)


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
    job = context.job
    if job is None or not _may_come_back(context):
        return {}
    if not verdict.again and decision.code is not ExitCode.CHECKPOINT_FAILED:
        return {}
    launcher, history, config = context.launcher, context.history, context.config
    bad = nodes_to_exclude(launcher, node, history, config, decision, verdict.last)
    # Nodes that do not fit together cannot be used all the same: then the job waits for them.
    return bad if bad and (decision.environment or job.finds_others(list(bad))) else {}


def _may_come_back(context: SupervisorContext) -> bool:
    """Whether the job can be put back into the queue, to go on by way of it.

    Ranks may fail before Slurm has said anything in their attempt.
    """
    job = context.job
    known = job.last_known() if job is not None and job.batch else None
    return known is not None and known.may_requeue


def _failure(context: SupervisorContext, follower: AttemptFollower, decision: Decision) -> Failure:
    culprit = next((end for end in follower.ends if end.rank == decision.culprit), None)
    raised = culprit.raised if culprit is not None else ""
    return Failure(
        # Of a rank that was killed the last report is old; the others' came as they left.
        step=follower.step_of(decision.culprit if raised else None),
        committed=context.history.refresh().last_step,
        raised=raised,
        node_lost=decision.environment or (culprit is not None and is_lost(culprit)),
        code=int(decision.code),
        unstarted=_unstarted(follower, culprit),
    )


def _unstarted(follower: AttemptFollower, culprit: RankExit | None) -> int | None:
    """The exit status of a program of the user's own that ended by itself, before it had said a
    word, so soon that it cannot have begun: an import fails, say."""
    if culprit is None or not follower.reports_nothing or follower.steps_done:
        return None
    by_itself = culprit.status is not None and culprit.status > 0
    return culprit.status if by_itself and follower.seconds_run() < BEGINS_WITHIN else None
