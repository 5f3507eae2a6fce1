"""What failed first: in a job by its logs alone, in a run by its ledger and its logs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kempner.insight.triage.ends import plain_status, what_status_means, words_of
from kempner.insight.triage.log.reading import read_log
from kempner.insight.triage.rules import Cause, SignLevel, Sure
from kempner.insight.triage.scan import Scan, match
from kempner.insight.triage.table.everything import CAUSES
from kempner.insight.triage.table.program import (
    BAD_DATA,
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
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    Completed,
    Diverged,
    HangFound,
    NodeSuspected,
    Stopped,
)
from kempner.run.record.history import Entry, RunHistory
from kempner.run.record.lease import is_owned
from kempner.run.record.run_dir import RunDirectory

MOST_RANKS = 64
"""Ranks whose logs are read where the ledger does not name one."""

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


@dataclass(frozen=True)
class _EndedAttempt:
    """What the ledger holds of an attempt that is over."""

    number: int
    ended: AttemptEnded
    failed: AttemptFailed | None
    hang: HangFound | None
    diverged: Diverged | None

    @property
    def status(self) -> int | None:
        """How the first rank to fail ended; None if its end was not seen."""
        exits, culprit = self.ended.exits, self.ended.culprit
        return None if culprit is None else exits.get(str(culprit))


def triage_run(run: RunDirectory) -> Verdict:
    """The verdict on the last failure of a run; on its stop, if nothing failed.

    Raises `OSError` if the ledger cannot be read now.
    """
    history = RunHistory.read(run.ledger)
    over = [_attempt(entry, history) for entry in history.entries(AttemptEnded)]
    went_on = (ExitCode.COMPLETED, ExitCode.STOPPED)
    failures = [attempt for attempt in over if attempt.ended.code not in went_on]
    if failures:
        verdict = _judge(run, history, failures[-1])
        return replace(verdict, notes=(*verdict.notes, *_afterwards(history, failures)))
    if len(history.entries(AttemptStarted)) > len(over) and not _is_alive(run):
        return Verdict(UNKNOWN, _GONE, _ASK, Sure.UNKNOWN)
    return _stopped(history)


_GONE = "the run ended without a message: its supervisor was killed, or its machine is gone"
_ASK = "ask `sacct -j JOB` how the job ended, and start the run again: it goes on by itself"


def _is_alive(run: RunDirectory) -> bool:
    """Whether the run has an owner; where that cannot be seen now, it is taken to have one."""
    try:
        return is_owned(run.supervisors)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _attempt(entry: Entry[AttemptEnded], history: RunHistory) -> _EndedAttempt:
    number = entry.attempt
    return _EndedAttempt(
        number,
        entry.event,
        next((e.event for e in history.entries(AttemptFailed) if e.attempt == number), None),
        next((e.event for e in history.entries(HangFound) if e.attempt == number), None),
        next((e.event for e in history.entries(Diverged) if e.attempt == number), None),
    )


def _judge(run: RunDirectory, history: RunHistory, attempt: _EndedAttempt) -> Verdict:
    rank = attempt.ended.culprit
    if attempt.hang is not None and attempt.hang.laggard is not None:
        rank = attempt.hang.laggard
    scan = _scan(run, attempt.number, rank)
    cause, sure = _cause(attempt, scan)
    node = (attempt.failed.node if attempt.failed else "") or None
    if rank is not None:
        node = scan.places.nodes.get(rank) or node
    told = decide(scan)
    raised = attempt.failed.raised if attempt.failed else ""
    shown = Evidence(str(run.ledger), f"attempt {attempt.number}: {attempt.ended.reason}")
    return Verdict(
        cause.name,
        cause.says,
        cause.do,
        sure,
        FailureLocation(
            rank, node, () if rank is None else (rank,), () if node is None else (node,)
        ),
        FirstError(
            raised or attempt.ended.reason,
            told.told.frame if told.rank in (rank, None) else "",
            (shown, *(told.evidence if told.known else ())),
        ),
        tuple(_others(attempt, rank)),
        (*_hang(attempt), *_suspects(history, attempt.number), *told.notes),
    )


def _cause(attempt: _EndedAttempt, scan: Scan) -> tuple[Cause, Sure]:
    """By the ledger; by the rank's log where that says no more than an exit code."""
    raised = attempt.failed.raised if attempt.failed else ""
    said = raised or attempt.ended.reason
    if attempt.hang is not None:
        return HANG, Sure.CERTAIN
    if attempt.diverged is not None:
        return CAUSES["loss_not_finite"], Sure.CERTAIN
    if "out of memory" in said and "CUDA" not in said and "HIP" not in said:
        return CAUSES["host_out_of_memory"], Sure.CERTAIN
    if (hit := match(said)) is not None and hit[0].level < SignLevel.SYMPTOM:
        return hit[1], hit[0].sure
    told = decide(scan)
    if told.known and told.cause not in ("peer_lost", "exception"):
        return CAUSES[told.cause], told.sure
    return _by_status(attempt, raised)


def _by_status(attempt: _EndedAttempt, raised: str) -> tuple[Cause, Sure]:
    status = attempt.status
    code = next((code for code in _BY_CODE if code == attempt.ended.code), None)
    if code is not None:
        return _BY_CODE[code], Sure.LIKELY if code is ExitCode.PEERS_LOST else Sure.CERTAIN
    if raised:
        return RAISED, Sure.CERTAIN
    if attempt.ended.culprit is None:
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
        yield run.log(attempt, rank)
        yield run.output(attempt, rank)
    else:
        yield from sorted(run.attempt(attempt).glob("rank-*.jsonl"))[:MOST_RANKS]
        yield from sorted(run.attempt(attempt).glob("rank-*.out"))[:MOST_RANKS]


def _others(attempt: _EndedAttempt, first: int | None) -> Iterator[str]:
    """How the other ranks ended, those with the same status together."""
    together: dict[int | None, list[int]] = {}
    for name, status in attempt.ended.exits.items():
        if name.isdigit() and int(name) != first and status != 0:
            together.setdefault(status, []).append(int(name))
    for status, ranks in together.items():
        how = "not known" if status is None else words_of(status)
        if status == ExitCode.PEERS_LOST:
            how = "lost their peer (exit code 76)"
        yield f"rank{'s' if ranks[1:] else ''} {spans(sorted(ranks))}: {how}"


def _hang(attempt: _EndedAttempt) -> Iterator[str]:
    if attempt.hang is not None:
        yield attempt.hang.reason
        yield from attempt.hang.processes[:3]


def _suspects(history: RunHistory, attempt: int) -> Iterator[str]:
    for entry in history.entries(NodeSuspected):
        if entry.attempt == attempt:
            yield f"{entry.event.node} is suspected: {entry.event.reason}"


def _afterwards(history: RunHistory, failures: list[_EndedAttempt]) -> Iterator[str]:
    last = failures[-1].number
    if len(failures) > 1:
        numbers = spans([attempt.number for attempt in failures])
        yield f"attempts {numbers} failed; this is the last of them"
    if any(entry.attempt > last for entry in history.entries(Completed)):
        yield "a later attempt completed the run"
    elif any(entry.attempt > last for entry in history.entries(AttemptStarted)):
        yield "the run was started again after it"


def _stopped(history: RunHistory) -> Verdict:
    """Of a run without a failure: why it stopped, or that nothing happened."""
    stops = history.events(Stopped, Completed)
    last = stops[-1] if stops else None
    if not isinstance(last, Stopped):
        return Verdict(NOTHING.name, NOTHING.says, NOTHING.do, Sure.CERTAIN)
    reason = StopReason.of_label(last.reason)
    cause = CAUSES.get(_STOPS.get(reason, ""), STOPPED)
    says = last.sentence or f"stopped after step {last.step}, {last.lost_steps} steps lost"
    return Verdict(cause.name, cause.says, cause.do, Sure.CERTAIN, told=FirstError(says))


def triage_logs(paths: Sequence[Path]) -> Verdict:
    """The verdict on one job, of which these are the logs.

    Raises `OSError` if one cannot be read.
    """
    scan = Scan()
    for path in paths:
        scan.read(str(path), read_log(path))
    return decide(scan)
