"""What interrupted a run: when, why, where, and what each interruption cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kempner.insight.report.attempts import InterruptionKind, cause_of
from kempner.insight.report.timeline import AttemptTime, Category, Pieces, Timeline
from kempner.run.record.events import AttemptEnded, AttemptFailed

HOUR = 3600.0


@dataclass(frozen=True)
class InterruptionPlace:
    """Where a run was interrupted. `rank` failed first, on `node`, if one did.

    `step` is the last one that was made; `steps_lost` had to be made again.
    """

    rank: int | None
    node: str
    step: int
    steps_lost: int


@dataclass(frozen=True)
class Cost:
    """What an interruption cost, in seconds of wall time, and in GPU hours on all ranks.

    It is the end of the attempt (`hung_seconds`, `stop_seconds`), the start of the next one
    (`restart_seconds`), and the steps that were cut off or made again. In `away_seconds` (queued,
    or not started) no machine was held.

    `hung_seconds` begin with the last step. At their end are `still_seconds`, in which the
    supervisor saw no rank move, and at the end of those `evidence_seconds`, in which it knew that
    this is a hang and collected evidence; None if that is not known.
    """

    hung_seconds: float
    still_seconds: float | None
    evidence_seconds: float | None
    stop_seconds: float
    restart_seconds: float
    made_again_seconds: float
    away_seconds: float
    gpu_hours: float


@dataclass(frozen=True)
class Interruption:
    """One end of an attempt before the run's last step. `time` is in seconds since the epoch."""

    number: int
    time: float
    attempt: int
    kind: InterruptionKind
    cause: str
    detail: str
    place: InterruptionPlace
    cost: Cost


def interruptions_of(timeline: Timeline, dead: bool = False) -> list[Interruption]:
    """Those of a run, in their order; of one that is `dead`, its last attempt has ended, too."""
    found: list[Interruption] = []
    front = 0
    for place, time in enumerate(timeline.attempts):
        front = max(front, time.front)
        later = timeline.attempts[place + 1 :]
        unfinished = not (later or time.facts.over or dead)
        if not (time.facts.completed or unfinished):
            found.append(_interruption(len(found) + 1, time, later, front))
    return found


def _interruption(
    number: int, time: AttemptTime, later: Sequence[AttemptTime], front: int
) -> Interruption:
    following = later[0] if later else None
    resumed = _resumption(time, later)
    again = None if resumed is None else resumed.facts.first_step
    facts = time.facts
    kind, cause, detail = cause_of(facts)
    failed, ended = facts.last(AttemptFailed), facts.last(AttemptEnded)
    place = InterruptionPlace(
        rank=None if ended is None or kind is InterruptionKind.STOP else ended.event.culprit,
        node="" if failed is None else failed.event.node,
        step=max(time.front, facts.known_step),
        steps_lost=0 if again is None else max(0, front - again),
    )
    over = float(time.tail.end[-1]) if kind is InterruptionKind.STOP else _noticed(time)
    cost = _cost(time, following, resumed)
    return Interruption(number, over, facts.number, kind, cause, detail, place, cost)


def _resumption(time: AttemptTime, later: Sequence[AttemptTime]) -> AttemptTime | None:
    """The next attempt that came to a step, where this one did: it makes again what was lost.

    An attempt that ended before its first step has no step to lose, and makes none again.
    """
    if time.facts.ready_at is None:
        return None
    return next((each for each in later if each.facts.ready_at is not None), None)


def _cost(time: AttemptTime, following: AttemptTime | None, resumed: AttemptTime | None) -> Cost:
    ours, theirs = _seconds(time.tail, time.gap), _after(following)
    recomputed = 0.0 if resumed is None else _seconds(resumed.body)[Category.RECOMPUTED]
    ranks = time.facts.started.ranks
    ranks_then = ranks if following is None else following.facts.started.ranks
    ending = (Category.HUNG, Category.STOP, Category.START, Category.RECOMPUTED)
    hang = time.facts.hang()
    still, evidence = (
        (None, None) if hang is None else (hang.event.seconds, hang.event.evidence_seconds)
    )
    here = sum(ours[c] for c in ending)
    there = theirs[Category.START] + theirs[Category.LOAD] + recomputed
    return Cost(
        hung_seconds=ours[Category.HUNG],
        still_seconds=still,
        evidence_seconds=evidence,
        stop_seconds=ours[Category.STOP],
        restart_seconds=ours[Category.START] + theirs[Category.START] + theirs[Category.LOAD],
        made_again_seconds=ours[Category.RECOMPUTED] + recomputed,
        away_seconds=ours[Category.QUEUE] + ours[Category.IDLE],
        gpu_hours=(here * ranks + there * ranks_then) / HOUR,
    )


def _seconds(*pieces: Pieces) -> list[float]:
    return [float(x) for x in sum(p.seconds() for p in pieces)]  # type: ignore[union-attr]


def _after(following: AttemptTime | None) -> list[float]:
    """Seconds of the next attempt that the interruption before it is to blame for."""
    if following is None:
        return [0.0] * len(Category)
    seconds = _seconds(following.body)
    if following.facts.ready_at is None:
        seconds[Category.START] += _seconds(following.tail)[Category.START]
    return seconds


def _noticed(time: AttemptTime) -> float:
    """When the attempt was over for its ranks: the failure, or the moment a hang was found."""
    ending = time.tail.begin[time.tail.category == Category.STOP]
    return float(ending[0]) if len(ending) else time.facts.end
