"""The history of a run: the typed events of its ledger, which is read once."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import inf
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

from kempner.run.output.logs import logger
from kempner.run.process.threads import steady_time
from kempner.run.record.events import (
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    CheckpointsCertified,
    CorruptionFound,
    LedgerEvent,
    NodesLeft,
    NodesTakenBack,
    NodeSuspected,
    PhaseDurationsLearned,
    ProgramAdvanced,
    Requeued,
    Resumed,
    RolledBack,
    RunGivenUp,
    StartedAnew,
    parse_event,
)
from kempner.run.record.ledger import FileTail, Ledger, parse_lines
from kempner.run.record.save_times import REMEMBERED, Durations

E = TypeVar("E", bound=LedgerEvent)
F = TypeVar("F", bound=LedgerEvent)
G = TypeVar("G", bound=LedgerEvent)
E_co = TypeVar("E_co", bound=LedgerEvent, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[E_co]):
    """An event, when it was written (`time`, seconds since the epoch) and in which attempt; 0 if
    the ledger does not say.

    Events written after a supervisor opened its history with `RunHistory.of` have the time of its
    `steady_time`, which does not follow changes of the system clock.
    """

    event: E_co
    time: float
    attempt: int


KEPT = 32
"""The last events of each kind that a supervisor's history keeps, whatever they are."""

ALIKE = REMEMBERED
"""The last events that it keeps besides of each subject, see `_subjects`."""

MOST_ALIKE = 512
"""The most events of a kind that it keeps for their subjects."""

THINNED_FROM = 512
"""Events that a supervisor's history has when it is thinned for the first time."""

_PROGRESS = (CheckpointCommitted, ProgramAdvanced, RunGivenUp)


def _subjects(event: LedgerEvent) -> Sequence[object]:
    """What an old event is kept for; of most kinds only the last events are read."""
    match event:
        case AttemptFailed():
            return ((event.node, event.raised),)
        case NodeSuspected():
            return (event.node,)
        case NodesTakenBack() | NodesLeft() | CorruptionFound():
            return event.nodes
        case Requeued():
            ours = [(event.job, node) for node in event.without]
            return ours if event.preempted else [*ours, event.job]
        case CheckpointCommitted():
            return ("timed",) if event.took is not None and not event.suspended else ()
        case PhaseDurationsLearned():
            return (event.ranks,)
    return ()


class RunHistory:
    """The events of a run, oldest first; lines that cannot be parsed are skipped. `refresh` adds
    new ones, and reads no line twice. A history made by `of` has this process's own events at once,
    also while they cannot be written."""

    def __init__(
        self, lines: Iterable[Mapping[str, Any]] = (), tail: FileTail | None = None
    ) -> None:
        self._tail, self._lock = tail, threading.Lock()
        self._own: dict[bytes, Entry[LedgerEvent]] = {}
        self._read_at: float | None = None
        self._thin_from: float = inf
        self._forget()
        self.add(lines)

    def _forget(self) -> None:
        self._entries: list[Entry[LedgerEvent]] = []
        self._places: defaultdict[type[LedgerEvent], list[int]] = defaultdict(list)
        self._steps: dict[str, int] = {}

    @classmethod
    def read(cls, ledger: Path) -> Self:
        """The whole ledger; empty if there is none yet. Raises `OSError`."""
        history = cls(tail=FileTail(ledger))
        history.read_on()
        return history

    @classmethod
    def to_resume(cls, ledger: Path) -> Self:
        """Only the events that a rank needs to resume, so that it starts as fast after thousands of
        attempts as after one. Raises `OSError`."""
        history = cls(tail=FileTail(ledger, keep=needed_to_resume))
        history.read_on()
        return history

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        """The ledger of this process, including the events that it records from now on, without
        those that later events have made obsolete, so that it stays small after thousands of
        attempts. Raises `OSError`."""
        history = cls(tail=FileTail(ledger.path))
        history._thin_from = THINNED_FROM
        ledger.tell(history._hear)
        history.read_on()
        history._read_at = steady_time()
        return history

    def _hear(self, line: str) -> None:
        entry = _parse_entry(json.loads(line))
        if entry is not None:
            with self._lock:
                self._own[line.encode()] = replace(entry, time=steady_time())

    def refresh(self) -> Self:
        """Add what any process has written since, and return this history. If the ledger cannot be
        read now, the next call adds it."""
        try:
            self.read_on()
        except OSError as error:
            logger().warning("cannot read the ledger", file=error.filename, error=error.strerror)
        return self

    def read_on(self) -> None:
        """As `refresh`, but raises `OSError` if the ledger cannot be read now."""
        if self._tail is None:
            return
        lines, anew = self._tail.read()
        read = [(line, parsed) for line in lines for parsed in parse_lines(line)]
        if anew and not self._tail.whole:  # the first attempt may be incomplete
            starts = (n for n, (_, line) in enumerate(read) if _begins(line))
            read = read[next(starts, 0) :]
        with self._lock:
            if anew:
                self._forget()
            found = [
                self._own.pop(line, None) or self._placed(_parse_entry(parsed), anew)
                for line, parsed in read
            ]
            self._take(entry for entry in found if entry is not None)
        self._read_at = self._read_at and steady_time()

    def _placed(self, entry: Entry[LedgerEvent] | None, anew: bool) -> Entry[LedgerEvent] | None:
        """Give another process's entry a time between the last look and now, whatever its clock."""
        if entry is None or self._read_at is None or anew:
            return entry
        return replace(entry, time=min(max(entry.time, self._read_at), steady_time()))

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        parsed = map(_parse_entry, lines)
        self._take(entry for entry in parsed if entry is not None)

    def _take(self, entries: Iterable[Entry[LedgerEvent]]) -> None:
        for entry in entries:
            self._places[type(entry.event)].append(len(self._entries))
            self._entries.append(entry)
            _take_step(self._steps, entry.event)
        if len(self._entries) >= self._thin_from:
            self._thin()

    def _thin(self) -> None:
        """Drop what no decision of a supervisor depends on any more."""
        known, steps = self._entries, self._steps
        kept = sorted({at for kind in self._places for at in self._kept(kind)})
        self._forget()
        self._steps.update(steps)
        for at in kept:
            self._places[type(known[at].event)].append(len(self._entries))
            self._entries.append(known[at])
        # Twice as many: so an event is looked at a few times only, however many come.
        self._thin_from = max(THINNED_FROM, 2 * len(kept))

    def _kept(self, kind: type[LedgerEvent]) -> set[int]:
        places = self._places[kind]
        older, last = places[:-KEPT], set(places[-KEPT:])
        if kind is AttemptFailed:
            last |= self._since_progress(older)
        elif kind is PhaseDurationsLearned:
            last |= self._longest_starts(places)
        elif kind is ProgramAdvanced:
            last |= self._furthest(places)
        return last | self._last_alike(older)

    def _longest_starts(self, places: Iterable[int]) -> set[int]:
        """The longest start phase for each number of ranks."""
        longest: dict[int, tuple[float, int]] = {}
        for at in places:
            event = self._entries[at].event
            if isinstance(event, PhaseDurationsLearned) and (start := event.phases.get("start")):
                found = (start.median + start.spread, at)
                longest[event.ranks] = max(found, longest.get(event.ranks, found))
        return {at for _, at in longest.values()}

    def _furthest(self, places: Iterable[int]) -> set[int]:
        """The furthest step that a program reported."""
        events = ((self._entries[at].event, at) for at in places)
        steps = [(e.step, at) for e, at in events if isinstance(e, ProgramAdvanced) and e.step]
        return {max(steps)[1]} if steps else set()

    def _since_progress(self, places: Iterable[int]) -> set[int]:
        """The failures since the last progress, which decide about a restart."""
        ends = (self._places[kind][-1:] for kind in _PROGRESS if kind in self._places)
        progress = max(chain.from_iterable(ends), default=-1)
        return {at for at in places if at > progress}

    def _last_alike(self, places: Iterable[int]) -> set[int]:
        """The last events of each subject: they may make a node suspect, or count how often it was
        taken back."""
        found = defaultdict[object, deque[int]](lambda: deque(maxlen=ALIKE))
        for at in places:
            for subject in _subjects(self._entries[at].event):
                found[subject].append(at)
        return set(sorted(set().union(*found.values()))[-MOST_ALIKE:])

    @overload
    def entries(self, kind: type[E], /) -> list[Entry[E]]: ...
    @overload
    def entries(self, kind: type[E], other: type[F], /) -> list[Entry[E | F]]: ...
    @overload
    def entries(
        self, kind: type[E], other: type[F], third: type[G], /
    ) -> list[Entry[E | F | G]]: ...
    def entries(self, *kinds: type[LedgerEvent]) -> list[Any]:
        """The events of up to three kinds, in the order in which they were written; of all for
        `LedgerEvent`."""
        with self._lock:
            if LedgerEvent in kinds:
                return [*self._entries, *self._own.values()]
            places = [self._places[kind] for kind in kinds if kind in self._places]
            read = [self._entries[at] for at in sorted(chain.from_iterable(places))]
            return [*read, *(own for own in self._own.values() if isinstance(own.event, kinds))]

    @overload
    def events(self, kind: type[E], /) -> list[E]: ...
    @overload
    def events(self, kind: type[E], other: type[F], /) -> list[E | F]: ...
    @overload
    def events(self, kind: type[E], other: type[F], third: type[G], /) -> list[E | F | G]: ...
    @overload
    def events(self, *kinds: type[LedgerEvent]) -> list[LedgerEvent]: ...
    def events(self, *kinds: type[LedgerEvent]) -> list[Any]:
        """As `entries`, without times and attempts."""
        return [entry.event for entry in self.entries(*kinds)]

    @property
    def durations(self) -> Durations:
        newest_first = reversed(self.events(CheckpointCommitted))
        took = (commit.took for commit in newest_first if not commit.suspended)
        last = list(islice((each for each in took if each is not None), REMEMBERED))
        return Durations(tuple(reversed(last)))

    @property
    def last_step(self) -> int | None:
        """The step of the newest commit; None if there is none. For a program with several loops,
        the sum over its loops. A commit that a rank did not live to report counts from the next
        resume from it; a resume from an older checkpoint changes nothing. Commits that silent
        corruption made doubtful do not count."""
        newest = self._newest
        return sum(newest.values()) if newest else None

    def last_step_in(self, place: str) -> int | None:
        """As `last_step`, for the loop whose checkpoints are in `place`."""
        return self._newest.get(place)

    @property
    def _newest(self) -> dict[str, int]:
        """The step of the newest commit by place."""
        with self._lock:
            newest, own = dict(self._steps), list(self._own.values())
        for entry in own:
            _take_step(newest, entry.event)
        return newest


def _begins(line: Mapping[str, Any]) -> bool:
    return line.get("event") == AttemptStarted.name


def _take_step(newest: dict[str, int], event: LedgerEvent) -> None:
    if isinstance(event, CheckpointCommitted) or (
        isinstance(event, Resumed) and event.step > newest.get(event.place, 0)
    ):
        newest[event.place] = event.step
    elif isinstance(event, CorruptionFound):  # of kempner's own trainer, which has one place
        newest.pop("", None)
        newest |= {} if event.to is None else {"": event.to}


_KIND = re.compile(rb'"event": "(\w+)"')
_PLACE = re.compile(rb'"place": "([^"]*)"')


def needed_to_resume(lines: list[bytes]) -> list[bytes]:
    """The lines that `RunHistory.to_resume` keeps: starts at step 0, rollbacks, silent corruption,
    the last certificate, and for each place the last commits and the resume since. Later lines of a
    place make earlier ones obsolete."""
    kept, commits, certified = list[bytes](), Counter[bytes](), False
    for line in reversed(lines):
        found = _KIND.search(line)
        kind = "" if found is None else found[1].decode()
        committed = kind == CheckpointCommitted.name
        if kind in (StartedAnew.name, RolledBack.name, CorruptionFound.name):
            kept.append(line)
        elif kind == CheckpointsCertified.name and not certified:
            kept.append(line)
            certified = True
        elif committed or kind == Resumed.name:
            named = _PLACE.search(line)
            place = b"" if named is None else named[1]
            if commits[place] < (2 * REMEMBERED if committed else 1):
                kept.append(line)
            commits[place] += committed
    return kept[::-1]


def _parse_entry(line: Mapping[str, Any]) -> Entry[LedgerEvent] | None:
    event = parse_event(line.get("event"), line)
    time, attempt = line.get("time", 0.0), line.get("attempt", 0)
    if event is None or not isinstance(time, int | float) or not isinstance(attempt, int):
        return None
    return Entry(event, time, attempt)
