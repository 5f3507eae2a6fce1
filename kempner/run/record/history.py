"""What happened to a run so far: its ledger, read once, as typed events.

What a reader makes of the events is its own affair: it asks for those of the kinds that it knows.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

from kempner.run.output.logs import logger
from kempner.run.process.threads import steady_time
from kempner.run.record.events import (
    AttemptStarted,
    CheckpointCommitted,
    LedgerEvent,
    Resumed,
    parse_event,
)
from kempner.run.record.ledger import FileTail, Ledger, parse_lines
from kempner.run.record.save_times import Durations

E = TypeVar("E", bound=LedgerEvent)
F = TypeVar("F", bound=LedgerEvent)
G = TypeVar("G", bound=LedgerEvent)
E_co = TypeVar("E_co", bound=LedgerEvent, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[E_co]):
    """An event, when it was written (`time`, seconds since the epoch) and in which attempt; 0 where
    the ledger does not say so.

    What was written since a supervisor's history is `of` its ledger has the `time` of its
    `steady_time`, which no setting of the clock moves."""

    event: E_co
    time: float
    attempt: int


class RunHistory:
    """The events of a run, oldest first. A line that cannot be understood is passed over. `refresh`
    adds those that were written since, and reads no line twice. What this process records in a
    ledger that the history is `of` is known at once, also while it cannot be written."""

    def __init__(
        self, lines: Iterable[Mapping[str, Any]] = (), tail: FileTail | None = None
    ) -> None:
        self._tail, self._lock = tail, threading.Lock()
        self._entries: list[Entry[LedgerEvent]] = []
        self._own: dict[bytes, Entry[LedgerEvent]] = {}
        self._read_at: float | None = None
        self.add(lines)

    @classmethod
    def read(cls, ledger: Path) -> Self:
        """The history that the ledger tells; empty if there is none yet. Raises `OSError`."""
        history = cls(tail=FileTail(ledger))
        history.read_on()
        return history

    @classmethod
    def of(cls, ledger: Ledger) -> Self:
        """The same, with what this process records in the ledger. Raises `OSError`."""
        history = cls(tail=FileTail(ledger.path))
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
        """Read what any process has written since, now or at the next time; returns this
        history."""
        try:
            self.read_on()
        except OSError as error:
            logger().warning("cannot read the ledger", file=error.filename, error=error.strerror)
        return self

    def read_on(self) -> None:
        """The same. Raises `OSError` if the ledger cannot be read now."""
        if self._tail is None:
            return
        lines, anew = self._tail.read()
        read = [(line, parsed) for line in lines for parsed in parse_lines(line)]
        if anew and not self._tail.whole:  # the first attempt would be told of in part
            starts = (n for n, (_, line) in enumerate(read) if _begins(line))
            read = read[next(starts, 0) :]
        with self._lock:
            if anew:
                self._entries = []
            for line, parsed in read:
                entry = self._own.pop(line, None) or self._placed(_parse_entry(parsed), anew)
                self._entries += [] if entry is None else [entry]
        self._read_at = self._read_at and steady_time()

    def _placed(self, entry: Entry[LedgerEvent] | None, anew: bool) -> Entry[LedgerEvent] | None:
        """An entry of another process: written between two looks, whatever its clock says."""
        if entry is None or self._read_at is None or anew:
            return entry
        return replace(entry, time=min(max(entry.time, self._read_at), steady_time()))

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        self._entries += (entry for line in lines if (entry := _parse_entry(line)) is not None)

    @overload
    def entries(self, kind: type[E], /) -> list[Entry[E]]: ...
    @overload
    def entries(self, kind: type[E], other: type[F], /) -> list[Entry[E | F]]: ...
    @overload
    def entries(
        self, kind: type[E], other: type[F], third: type[G], /
    ) -> list[Entry[E | F | G]]: ...
    def entries(self, *kinds: type[LedgerEvent]) -> list[Any]:
        """The events of up to three kinds, in the order in which they were written."""
        with self._lock:
            known = (*self._entries, *self._own.values())
        return [entry for entry in known if isinstance(entry.event, kinds)]

    @overload
    def events(self, kind: type[E], /) -> list[E]: ...
    @overload
    def events(self, kind: type[E], other: type[F], /) -> list[E | F]: ...
    @overload
    def events(self, kind: type[E], other: type[F], third: type[G], /) -> list[E | F | G]: ...
    @overload
    def events(self, *kinds: type[LedgerEvent]) -> list[LedgerEvent]: ...
    def events(self, *kinds: type[LedgerEvent]) -> list[Any]:
        """The same without times and attempts."""
        return [entry.event for entry in self.entries(*kinds)]

    @property
    def durations(self) -> Durations:
        durations = Durations()
        for commit in self.events(CheckpointCommitted):
            if commit.took is not None and not commit.suspended:
                durations = durations.with_another(commit.took)
        return durations

    @property
    def last_step(self) -> int | None:
        """The step of the newest commit; None if there is none. Of a program with several loops the
        sum of what each has saved, as its ranks count their steps. Of one whose rank died before it
        could say so the next resume tells. A resume from an older one is no commit."""
        newest = self._newest
        return sum(newest.values()) if newest else None

    def last_step_in(self, place: str) -> int | None:
        """The same of the loop whose checkpoints are in `place`, by its own count."""
        return self._newest.get(place)

    @property
    def _newest(self) -> dict[str, int]:
        newest: dict[str, int] = {}
        for event in self.events(CheckpointCommitted, Resumed):
            further = event.step > newest.get(event.place, 0)
            if isinstance(event, CheckpointCommitted) or further:
                newest[event.place] = event.step
        return newest


def _begins(line: Mapping[str, Any]) -> bool:
    return line.get("event") == AttemptStarted.name


def _parse_entry(line: Mapping[str, Any]) -> Entry[LedgerEvent] | None:
    event = parse_event(line.get("event"), line)
    time, attempt = line.get("time", 0.0), line.get("attempt", 0)
    if event is None or not isinstance(time, int | float) or not isinstance(attempt, int):
        return None
    return Entry(event, time, attempt)
