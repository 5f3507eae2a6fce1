"""Where a run's wall time went: a partition into categories, from the run's records.

The begin and end of attempts, loads, evaluations, hangs and waits come from the ledger; the time of
steps, and how long saves held them up, from the metrics. Time without a record is unaccounted.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import zip_longest
from typing import NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from kempner.insight.attempts import AttemptFacts
from kempner.insight.report.series import Numbers, StepSeries
from kempner.run.record.events import CheckpointCommitted, Evaluated, RolledBack
from kempner.run.record.save_times import nearest_rank


class Category(IntEnum):
    """The categories in the order of the report, each with its label and meaning. Each second of
    the wall time is in one at most; the rest is `UNACCOUNTED`."""

    label: str
    meaning: str

    def __new__(cls, number: int, label: str, meaning: str) -> Self:
        member = int.__new__(cls, number)
        member._value_, member.label, member.meaning = number, label, meaning
        return member

    TRAIN = 0, "Training", "steps that count, each one once"
    EVAL = 1, "Evaluation", "on held-out data, while training waits"
    SAVE = 2, "Held up by saves", "waiting for the save before, and until the state was copied"
    RECOMPUTED = (
        3,
        "Made again",
        "steps that an earlier attempt had made after its last checkpoint, and steps cut off",
    )
    HUNG = 4, "Hung", "from the last step until it was noticed that nothing moves, and looked into"
    STORAGE = (
        5,
        "Waiting for storage",
        "files that could not be read or written for a while, or a save that took far too long",
    )
    START = (
        6,
        "Start",
        "supervisor, node checks, launch, imports, rendezvous, and what the first step takes more",
    )
    LOAD = 7, "Load", "reading the checkpoint, after the ranks have met"
    STOP = 8, "Stop", "the last save, and until every rank is gone"
    QUEUE = 9, "Queue", "from the requeue until the next attempt; no machine is held"
    IDLE = 10, "Not running", "between an end and the next start by a user or another job"
    UNACCOUNTED = 11, "Unaccounted", "no record says what happened then"

    @property
    def key(self) -> str:
        """The name in `--json` and in the page's style sheet."""
        return self.name.lower()

    @property
    def holds_machines(self) -> bool:
        return self not in (Category.QUEUE, Category.IDLE)


Span: TypeAlias = tuple[float, float, Category]  # begin, end and category of a piece

Part: TypeAlias = tuple[Category | NDArray[np.int64], Numbers]
"""A category, or one per interval, and its seconds in each interval."""

LEAST = 1e-9  # seconds; shorter pieces are dropped


@dataclass(frozen=True)
class Pieces:
    """Pieces of time that do not overlap, sorted. `begin` and `end` are seconds since the epoch."""

    begin: Numbers
    end: Numbers
    category: NDArray[np.int64]

    @classmethod
    def of(cls, pieces: Iterable[Span]) -> Pieces:
        """Make pieces of spans; drops empty ones, and merges neighbours of one category."""
        kept = [(b, e, c) for b, e, c in pieces if e - b > LEAST]
        return cls(
            np.array([b for b, _, _ in kept], np.float64),
            np.array([e for _, e, _ in kept], np.float64),
            np.array([c for _, _, c in kept], np.int64),
        )._merged()

    @classmethod
    def in_intervals(cls, bounds: Numbers, parts: Sequence[Part]) -> Pieces:
        """Fill each interval between two of `bounds`, from its begin, with `parts`."""
        count = len(bounds) - 1
        seconds = np.stack([lengths for _, lengths in parts], axis=1)
        ends = bounds[:-1, None] + np.cumsum(seconds, axis=1)
        begins = ends - seconds
        kinds = np.stack([np.broadcast_to(np.int64(kind), (count,)) for kind, _ in parts], axis=1)
        kept = seconds.ravel() > LEAST
        flat = (array.ravel()[kept] for array in (begins, ends, kinds))
        return cls(*flat)._merged()  # type: ignore[arg-type]

    @classmethod
    def chain(cls, many: Sequence[Pieces]) -> Pieces:
        if not many:
            return cls.of(())
        columns = ("begin", "end", "category")
        joined = (np.concatenate([getattr(pieces, name) for pieces in many]) for name in columns)
        return cls(*joined)

    def _merged(self) -> Pieces:
        if len(self.begin) < 2:
            return self
        same = self.category[1:] == self.category[:-1]
        touching = np.abs(self.begin[1:] - self.end[:-1]) < 1e-6
        first = np.concatenate(([True], ~(same & touching)))
        last = np.concatenate((first[1:], [True]))
        return Pieces(self.begin[first], self.end[last], self.category[first])

    def seconds(self) -> Numbers:
        """The seconds of each category, by its number."""
        return np.bincount(self.category, self.end - self.begin, len(Category)).astype(np.float64)

    def shares(self, bounds: Numbers) -> Numbers:
        """Seconds of each category (columns) between two neighbours of `bounds` (rows)."""
        rows = np.zeros((len(bounds) - 1, len(Category)))
        for category in Category:
            chosen = self.category == category
            rows[:, category] = np.diff(_covered(self.begin[chosen], self.end[chosen], bounds))
        return rows


def _covered(begin: Numbers, end: Numbers, until: Numbers) -> Numbers:
    """For each time in `until`, the seconds before it that lie in one of these sorted pieces."""
    if not len(begin):
        return np.zeros(len(until))
    whole = np.concatenate(([0.0], np.cumsum(end - begin)))
    place = np.searchsorted(begin, until, side="right")
    inside = np.clip(end[np.maximum(place - 1, 0)] - until, 0.0, None) * (place > 0)
    return np.asarray(whole[place] - inside)


def overlaps(bounds: Numbers, spans: Sequence[tuple[float, float]]) -> Numbers:
    """Seconds of each interval between two of `bounds` that lie in one of `spans`."""
    joined: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((begin, end))
    begins, ends = (np.array([span[side] for span in joined], np.float64) for side in (0, 1))
    return np.diff(_covered(begins, ends, bounds))


STANDSTILL_STEPS, STANDSTILL_SECONDS = 10.0, 5.0
"""A step that takes more than this multiple of the usual time, and these seconds, counts as a
standstill; a save that does, as a standstill of storage."""


class _Medians(NamedTuple):
    """The medians of the run, in seconds: of a step, and of a save until it is durable; NaN if
    there is none."""

    step: float
    save: float


@dataclass(frozen=True)
class AttemptTime:
    """The time of one attempt: until its last step (`body`), from there to its end (`tail`), and to
    the next attempt (`gap`). `reached` is the last step that it made itself, 0 if none,
    `made_again` the number of steps that it repeated, `unit` the median of a step in seconds, NaN
    if unknown."""

    facts: AttemptFacts
    body: Pieces
    tail: Pieces
    gap: Pieces
    reached: int
    made_again: int
    unit: float


@dataclass(frozen=True)
class Timeline:
    """The whole run. `begin` and `end` are seconds since the epoch."""

    begin: float
    end: float
    attempts: tuple[AttemptTime, ...]

    @property
    def reports_nothing(self) -> bool:
        """Whether its training time is unknown: the program does not report its steps."""
        return all(time.facts.reports_nothing for time in self.attempts)

    @property
    def pieces(self) -> Pieces:
        return Pieces.chain([p for a in self.attempts for p in (a.body, a.tail, a.gap)])

    def seconds(self) -> Numbers:
        """The seconds of each category; the rest is unaccounted."""
        found = self.pieces.seconds()
        rest = self.end - self.begin - found.sum()
        found[Category.UNACCOUNTED] += max(0.0, rest)
        return found


def account(attempts: Sequence[AttemptFacts], series: StepSeries) -> Timeline:
    if not attempts:
        return Timeline(0.0, 0.0, ())
    commits = [e.event for facts in attempts for e in facts.all(CheckpointCommitted)]
    took = [c.took.total for c in commits if c.took is not None]
    usual = _Medians(
        step=_unit(series.time, series.step, series.save_seconds),
        save=nearest_rank(took, 0.5) or float("nan"),
    )
    done: list[AttemptTime] = []
    front = 0
    unreported = all(facts.reports_nothing for facts in attempts)
    unready = Category.UNACCOUNTED if unreported else Category.START
    for facts, following in zip_longest(attempts, attempts[1:]):
        own = series.of_attempt(facts.number)
        time = _account_attempt(facts, own, following, front, usual, unready)
        front = max(front, time.reached)
        done.append(time)
    end = max(time.gap.end[-1] if len(time.gap.end) else time.facts.end for time in done)
    return Timeline(attempts[0].begin, float(end), tuple(done))


def _account_attempt(
    facts: AttemptFacts,
    series: StepSeries,
    following: AttemptFacts | None,
    front: int,
    usual: _Medians,
    unready: Category,
) -> AttemptTime:
    """`unready` is the category of an attempt that does not report its first step."""
    end = facts.end if following is None else min(facts.end, following.begin)
    ready = facts.ready_at
    if ready is None or ready > end:
        tail = Pieces.of(_never_ready(facts, end, unready))
        reached = 0 if unready is Category.START else facts.known_step
        body, again, unit = Pieces.of(()), 0, float("nan")
    else:
        inside = (series.time > ready) & (series.time <= end)
        times = np.concatenate(([ready], series.time[inside]))
        times = np.maximum.accumulate(times)
        steps = np.concatenate(([facts.first_step or 0], series.step[inside]))
        saving = np.nan_to_num(series.save_seconds[inside])
        steps_made, again, unit = _steps(facts, times, steps, saving, front, usual)
        load = max(facts.begin, ready - facts.load_seconds)
        start = [
            *_with_storage(facts, facts.begin, load, Category.START),
            *_with_storage(facts, load, ready, Category.LOAD),
        ]
        body = Pieces.chain([Pieces.of(start), steps_made])
        last = int(steps.max())
        unlogged = max(0, facts.known_step - last)
        tail = Pieces.of(_tail(facts, float(times[-1]), end, unlogged, unit, last < front))
        reached = max(last, facts.known_step)
    gap = Pieces.of(_gap(facts, end, following))
    return AttemptTime(facts, body, tail, gap, reached, again, unit)


def _with_storage(facts: AttemptFacts, begin: float, end: float, category: Category) -> list[Span]:
    """This time as `category`, followed by the part of it that was spent waiting for storage."""
    waited = min(end - begin, float(overlaps(np.array([begin, end]), facts.storage_waits())[0]))
    return [(begin, end - waited, category), (end - waited, end, Category.STORAGE)]


def _never_ready(facts: AttemptFacts, end: float, what: Category) -> list[Span]:
    """The spans of an attempt without a reported step; `what` is the category until it ended."""
    if (hang := facts.hang()) is not None:
        found = min(hang.time, end)
        since = max(facts.begin, found - (hang.event.seconds or 0.0))
        return [
            *_with_storage(facts, facts.begin, since, what),
            (since, found, Category.HUNG),
            (found, end, Category.STOP),
        ]
    failed = facts.failed_at
    left = end if failed is None else min(failed, end)
    return [*_with_storage(facts, facts.begin, left, what), (left, end, Category.STOP)]


def _steps(
    facts: AttemptFacts,
    times: Numbers,
    steps: Numbers,
    saving: Numbers,
    front: int,
    usual: _Medians,
) -> tuple[Pieces, int, float]:
    """The time between logged steps, the number of repeated steps, and the seconds of a step."""
    if len(times) < 2:
        return Pieces.of(()), 0, usual.step
    took = np.diff(times)
    made = np.diff(steps)
    made[made <= 0] = max(1.0, float(np.median(made[made > 0]))) if (made > 0).any() else 1.0
    saved = np.minimum(np.nan_to_num(saving), took)
    evaluated = np.minimum(_evaluating(facts, times), took - saved)
    rest = took - saved - evaluated
    own = float(np.median((rest / made)[1:])) if len(rest) > 1 else usual.step
    unit = own if np.isfinite(own) else float(rest[0] / made[0])
    beyond = np.maximum(0.0, rest - made * unit)
    beyond[beyond < 1e-6] = 0.0
    cause, extra = _explain(facts, times, beyond, unit * made)
    rest = rest - extra
    before = np.maximum(front, np.maximum.accumulate(steps)[:-1])
    again = np.clip(np.minimum(steps[1:], before) - (steps[1:] - made), 0.0, made)
    lost = rest * again / made
    stalled = _stalled(facts, times, saved, usual.save)
    parts: list[Part] = [
        (Category.SAVE, saved - stalled),
        (Category.STORAGE, stalled),
        (Category.EVAL, evaluated),
        (cause, extra),
        (Category.RECOMPUTED, lost),
        (Category.TRAIN, rest - lost),
    ]
    return Pieces.in_intervals(times, parts), int(again.sum()), unit


def _stalled(facts: AttemptFacts, times: Numbers, saved: Numbers, usual: float) -> Numbers:
    """For each interval, the seconds of `saved` in which storage stood still: the time beyond the
    `usual` of saves that took far longer."""
    found = []
    for entry in facts.all(CheckpointCommitted):
        if (took := entry.event.took) is None or entry.event.suspended:
            continue
        beyond = took.total - usual
        if beyond > max((STANDSTILL_STEPS - 1) * usual, STANDSTILL_SECONDS):
            found.append((entry.time - beyond, entry.time))
    bounds = np.append(np.column_stack((times[:-1], times[:-1] + saved)).ravel(), times[-1])
    return overlaps(bounds, found)[::2]


def _evaluating(facts: AttemptFacts, times: Numbers) -> Numbers:
    seconds = np.zeros(len(times) - 1)
    for entry in facts.all(Evaluated):
        place = int(np.searchsorted(times, entry.time - entry.event.seconds / 2)) - 1
        if 0 <= place < len(seconds):
            seconds[place] += entry.event.seconds
    return seconds


def _explain(
    facts: AttemptFacts, times: Numbers, beyond: Numbers, normal: Numbers
) -> tuple[np.ndarray[tuple[int], np.dtype[np.int64]], Numbers]:
    """The category and the seconds of the time `beyond` the usual between two logged steps. An
    interval that is merely slow has none: that is the step's own time."""
    cause = np.full(len(beyond), int(Category.UNACCOUNTED), np.int64)
    far = beyond > np.maximum((STANDSTILL_STEPS - 1) * normal, STANDSTILL_SECONDS)
    extra = np.where(far, beyond, 0.0)
    waited = overlaps(times, facts.storage_waits())
    storage = np.minimum(waited, beyond)
    cause[storage > 0], extra = int(Category.STORAGE), np.where(storage > 0, storage, extra)
    for entry in facts.all(RolledBack):
        place = int(np.searchsorted(times, entry.time)) - 1
        if 0 <= place < len(beyond):
            cause[place], extra[place] = int(Category.LOAD), beyond[place]
    if storage[0] == 0:  # the first step compiles, and warms up
        cause[0], extra[0] = int(Category.START), beyond[0]
    return cause, extra


def _tail(
    facts: AttemptFacts, begin: float, end: float, unlogged: int, unit: float, behind: bool
) -> list[Span]:
    """From the last logged step to the end of the attempt.

    `unlogged` steps were made after it; with `behind` they repeat earlier ones.
    """
    took = unit if np.isfinite(unit) else 0.0
    last = min(end, begin + unlogged * took)
    evaluated = float(_evaluating(facts, np.array([last, end]))[0]) if end > last else 0.0
    idle = min(end, last + evaluated)
    made = Category.RECOMPUTED if behind else Category.TRAIN
    ending = _ending(facts, idle, end, took)
    return [(begin, last, made), (last, idle, Category.EVAL), *ending]


def _ending(facts: AttemptFacts, begin: float, end: float, step_takes: float) -> list[Span]:
    if (hang := facts.hang()) is not None:
        found = min(max(begin, hang.time), end)
        return [(begin, found, Category.HUNG), (found, end, Category.STOP)]
    if facts.in_order:
        return [(begin, end, Category.STOP)]
    if not facts.over:
        return [(begin, end, Category.UNACCOUNTED)]
    failed = max(begin, min(facts.failed_at or end, end))
    still = failed - begin > max(STANDSTILL_STEPS * step_takes, STANDSTILL_SECONDS)
    cut_off = min(failed, begin + step_takes) if still else failed
    return [
        (begin, cut_off, Category.RECOMPUTED),
        (cut_off, failed, Category.HUNG),
        (failed, end, Category.STOP),
    ]


def _gap(facts: AttemptFacts, end: float, following: AttemptFacts | None) -> list[Span]:
    """From the end of an attempt to the begin of the next, or to the last known event."""
    if following is None:
        last = max(end, *(entry.time for entry in facts.entries))
        return [(end, last, Category.STOP)]
    if facts.requeued_at is not None:
        left = min(max(end, facts.requeued_at), following.begin)
        return [(end, left, Category.STOP), (left, following.begin, Category.QUEUE)]
    if facts.restarted:
        return _with_storage(facts, end, following.begin, Category.START)
    before, after = facts.started, following.started
    same_job = before.job is not None and before.job == after.job
    # Slurm requeues jobs by itself, too, as after the loss of the first node.
    requeued = same_job and (after.restarts or 0) > (before.restarts or 0)
    return [(end, following.begin, Category.QUEUE if requeued else Category.IDLE)]


def _unit(times: Numbers, steps: Numbers, saving: Numbers) -> float:
    """The median seconds of a step of the whole run; NaN with fewer than two."""
    if len(times) < 2:
        return float("nan")
    made = np.diff(steps)
    took = np.diff(times) - np.nan_to_num(saving[1:])
    good = (made > 0) & (took > 0)
    return float(np.median(took[good] / made[good])) if good.any() else float("nan")
