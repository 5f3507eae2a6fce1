"""Gives up on a run: writes the reason to the ledger and to the file `GAVE_UP`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.retry import free_space_helps
from kempner.run.record import gave_up
from kempner.run.record.attempts import Attempt, read_current
from kempner.run.record.events import RunGivenUp
from kempner.run.record.gave_up import FirstFailure, GaveUp
from kempner.run.record.ledger import Ledger
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import Failure

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
