"""The first failure of a job, by its logs alone, and of a run, by its ledger and logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from kempner.insight.attempts import AttemptFacts
from kempner.insight.run_reader import RunReader
from kempner.insight.triage.ends import describe_status, plain_status, what_status_means
from kempner.insight.triage.log.reading import read_log
from kempner.insight.triage.rules import Cause, SignLevel, Sure
from kempner.insight.triage.scan import Scan, match
from kempner.insight.triage.table.everything import (
    BAD_DATA,
    CAUSES,
    DISAPPEARED,
    HANG,
    NOTHING,
    RAISED,
    STOPPED,
    UNEXPLAINED,
)
from kempner.insight.triage.verdict import (
    UNKNOWN,
    Evidence,
    FailureLocation,
    FirstError,
    Verdict,
    decide,
)
from kempner.run.output.units import spans
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    Completed,
    Diverged,
    NodeSuspected,
    Stopped,
)
from kempner.run.record.history import RunHistory
from kempner.run.record.run_dir import RunDirectory

MOST_RANKS = 64  # ranks whose logs are read if the ledger names none

_STOPS = {
    StopReason.TIME_LIMIT: "time_limit",
    StopReason.DEADLINE: "time_limit",
    StopReason.PREEMPTION: "preemption",
    StopReason.REQUEUE: "requeued",
    StopReason.CANCEL: "cancelled",
    StopReason.INTERRUPT: "interrupted",
}

_BY_CODE = {
    ExitCode.BAD_DATA: BAD_DATA,
    ExitCode.STORAGE_UNAVAILABLE: CAUSES["storage_error"],
    ExitCode.CHECKPOINT_FAILED: CAUSES["checkpoint_write_failed"],
    ExitCode.USAGE: CAUSES["usage"],
    ExitCode.HUNG: HANG,
    ExitCode.DIVERGED: CAUSES["loss_not_finite"],
    ExitCode.PEERS_LOST: CAUSES["peer_lost"],
    ExitCode.INTERRUPTED: CAUSES["interrupted"],
}


def triage_run(run: RunDirectory) -> Verdict:
    """The verdict on the last failure of a run; on its stop, if nothing failed.

    Raises `OSError` if the ledger cannot be read now.
    """
    reader = RunReader(run, whole=True)
    facts = reader.read()
    over = [attempt for attempt in facts.attempts if attempt.over]
    went_on = (ExitCode.COMPLETED, ExitCode.STOPPED)
    failures = [attempt for attempt in over if _end(attempt).code not in went_on]
    if failures:
        verdict = _judge(run, failures[-1])
        return replace(verdict, notes=(*verdict.notes, *_afterwards(facts.attempts, failures)))
    started = [attempt for attempt in facts.attempts if attempt.first(AttemptStarted)]
    if len(started) > len(over) and reader.is_alive(patient=True) is False:
        return Verdict(UNKNOWN, _GONE, _ASK, Sure.UNKNOWN)
    return _stopped(facts.history)


_GONE = "the run ended without a message: its supervisor was killed, or its machine is gone"
_ASK = "ask `sacct -j JOB` how the job ended, and start the run again: it goes on by itself"


def _end(attempt: AttemptFacts) -> AttemptEnded:
    assert attempt.ended is not None
    return attempt.ended


def _raised(attempt: AttemptFacts) -> str:
    failed = attempt.first(AttemptFailed)
    return "" if failed is None else failed.event.raised


def _judge(run: RunDirectory, attempt: AttemptFacts) -> Verdict:
    ended, hang, failed = _end(attempt), attempt.hang(), attempt.first(AttemptFailed)
    rank = ended.culprit
    if hang is not None and hang.event.laggard is not None:
        rank = hang.event.laggard
    scan = _scan(run, attempt.number, rank)
    cause, sure = _cause(attempt, scan)
    node = (failed.event.node if failed else "") or None
    if rank is not None:
        node = scan.places.nodes.get(rank) or node
    log_verdict = decide(scan)
    shown = Evidence(str(run.ledger), f"attempt {attempt.number}: {ended.reason}")
    return Verdict(
        cause.name,
        cause.says,
        cause.do,
        sure,
        FailureLocation(
            rank, node, () if rank is None else (rank,), () if node is None else (node,)
        ),
        FirstError(
            _raised(attempt) or ended.reason,
            log_verdict.first_error.frame if log_verdict.rank in (rank, None) else "",
            (shown, *(log_verdict.evidence if log_verdict.known else ())),
        ),
        tuple(_others(attempt, rank)),
        (*_notes(attempt), *log_verdict.notes),
    )


def _cause(attempt: AttemptFacts, scan: Scan) -> tuple[Cause, Sure]:
    """The cause by the ledger, or by the rank's log if the ledger has only an exit code."""
    raised = _raised(attempt)
    reason = raised or _end(attempt).reason
    if attempt.hang() is not None:
        return HANG, Sure.CERTAIN
    if attempt.first(Diverged) is not None:
        return CAUSES["loss_not_finite"], Sure.CERTAIN
    if "out of memory" in reason and "CUDA" not in reason and "HIP" not in reason:
        return CAUSES["host_out_of_memory"], Sure.CERTAIN
    if (hit := match(reason)) is not None and hit[0].level < SignLevel.SYMPTOM:
        return hit[1], hit[0].sure
    log_verdict = decide(scan)
    if log_verdict.known and log_verdict.cause not in ("peer_lost", "exception"):
        return CAUSES[log_verdict.cause], log_verdict.sure
    return _by_status(attempt, raised)


def _by_status(attempt: AttemptFacts, raised: str) -> tuple[Cause, Sure]:
    ended = _end(attempt)
    status = ended.exits.get(str(ended.culprit))  # None if the end of that rank was not seen
    code = next((code for code in _BY_CODE if code == ended.code), None)
    if code is not None:
        return _BY_CODE[code], Sure.LIKELY if code is ExitCode.PEERS_LOST else Sure.CERTAIN
    if raised:
        return RAISED, Sure.CERTAIN
    if ended.culprit is None:
        return UNEXPLAINED, Sure.UNKNOWN
    if status is None:
        return DISAPPEARED, Sure.LIKELY
    name, level, sure = what_status_means(plain_status(status))
    return (CAUSES[name], sure) if level < SignLevel.SYMPTOM else (UNEXPLAINED, Sure.UNKNOWN)


def _scan(run: RunDirectory, attempt: int, rank: int | None) -> Scan:
    scan = Scan()
    for path in _logs(run, attempt, rank):
        try:
            scan.read(str(path), read_log(path))
        except OSError:
            continue  # pruned, or its storage is away: the ledger is enough
    return scan


def _logs(run: RunDirectory, attempt: int, rank: int | None) -> Iterator[Path]:
    if rank is not None:
        yield from (run.log(attempt, rank), run.output(attempt, rank))
    else:
        for kind in ("rank-*.jsonl", "rank-*.out"):
            yield from sorted(run.attempt(attempt).glob(kind))[:MOST_RANKS]


def _others(attempt: AttemptFacts, first: int | None) -> Iterator[str]:
    together: dict[int | None, list[int]] = {}
    for name, status in _end(attempt).exits.items():
        if name.isdigit() and int(name) != first and status != 0:
            together.setdefault(status, []).append(int(name))
    for status, ranks in together.items():
        how = "not known" if status is None else describe_status(status)
        if status == ExitCode.PEERS_LOST:
            how = "lost their peer (exit code 76)"
        yield f"rank{'s' if ranks[1:] else ''} {spans(sorted(ranks))}: {how}"


def _notes(attempt: AttemptFacts) -> Iterator[str]:
    if (hang := attempt.hang()) is not None:
        yield hang.event.reason
        yield from hang.event.processes[:3]
    for entry in attempt.all(NodeSuspected):
        yield f"{entry.event.node} is suspected: {entry.event.reason}"


def _afterwards(
    attempts: Sequence[AttemptFacts], failures: Sequence[AttemptFacts]
) -> Iterator[str]:
    later = [attempt for attempt in attempts if attempt.number > failures[-1].number]
    if len(failures) > 1:
        numbers = spans([attempt.number for attempt in failures])
        yield f"attempts {numbers} failed; this is the last of them"
    if any(attempt.first(Completed) for attempt in later):
        yield "a later attempt completed the run"
    elif any(attempt.first(AttemptStarted) for attempt in later):
        yield "the run was started again after it"


def _stopped(history: RunHistory) -> Verdict:
    """The verdict on a run without a failure: why it stopped, if it did."""
    stops = history.events(Stopped, Completed)
    last = stops[-1] if stops else None
    if not isinstance(last, Stopped):
        return Verdict(NOTHING.name, NOTHING.says, NOTHING.do, Sure.CERTAIN)
    reason = StopReason.of_label(last.reason)
    cause = CAUSES.get(_STOPS.get(reason, ""), STOPPED)
    says = last.sentence or f"stopped after step {last.step}, {last.lost_steps} steps lost"
    return Verdict(cause.name, cause.says, cause.do, Sure.CERTAIN, first_error=FirstError(says))


def triage_logs(paths: Sequence[Path]) -> Verdict:
    """The verdict on the job with these logs. Raises `OSError` if one cannot be read."""
    scan = Scan()
    for path in paths:
        scan.read(str(path), read_log(path))
    return decide(scan)
