"""What happened to a run so far: its ledger, read once, as typed events.

What a reader makes of the events is its own affair: it asks for those of the kinds that it knows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, overload

from kempner.run.output.logs import logger
from kempner.run.record.events import CheckpointCommitted, LedgerEvent, Resumed
from kempner.run.record.ledger import parse_lines
from kempner.run.record.save_times import Durations
from kempner.run.record.vocabulary import parse_event

E = TypeVar("E", bound=LedgerEvent)
F = TypeVar("F", bound=LedgerEvent)
G = TypeVar("G", bound=LedgerEvent)
E_co = TypeVar("E_co", bound=LedgerEvent, covariant=True)


@dataclass(frozen=True)
class Entry(Generic[E_co]):
    """An event as the ledger holds it.

    `time` is when it was written, in seconds since the epoch, `attempt` the number of the attempt;
    both are 0 where the line does not say so.
    """

    event: E_co
    time: float
    attempt: int


class RunHistory:
    """The events of a run, oldest first. A line that cannot be understood is passed over.

    `refresh` adds those that were written since, and reads no line twice. What this process has
    recorded counts also while it cannot be written.
    """

    def __init__(self, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._path: Path | None = None
        self._unwritten: Callable[[], list[str]] = list
        self._read_up_to = 0
        self._entries: list[Entry[LedgerEvent]] = []
        self._not_written_yet: list[Entry[LedgerEvent]] = []
        self.add(lines)

    @classmethod
    def read(cls, ledger: Path, unwritten: Callable[[], list[str]] = list) -> Self:
        """The history that the ledger tells; an empty one if there is none yet.

        `unwritten` are the lines of this process that the file does not have yet. Raises `OSError`
        if it cannot be read now.
        """
        history = cls()
        history._path, history._unwritten = ledger, unwritten
        history._read_on(ledger)
        return history

    def refresh(self) -> Self:
        """Read what any process has written since the last time; returns this history.

        What cannot be read now is read at the next time.
        """
        try:
            if self._path is not None:
                self._read_on(self._path)
        except OSError as error:
            logger().warning("cannot read the ledger", file=str(self._path), error=error.strerror)
        return self

    def _read_on(self, path: Path) -> None:
        waiting = [line.encode() for line in self._unwritten()]  # asked first, or one may be missed
        self._not_written_yet = _parse_all(waiting)
        try:
            with path.open("rb") as file:
                file.seek(self._read_up_to)
                content = file.read()
        except FileNotFoundError:
            content = b""
        written = set(content.splitlines())
        self._not_written_yet = _parse_all(line for line in waiting if line not in written)
        tail = content[content.rfind(b"\n") + 1 :]
        torn = not any(parse_lines(tail))  # or only its newline is missing
        self._read_up_to += len(content) - len(tail) * torn
        self.add(parse_lines(content))

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        """Add lines of a ledger, as JSON objects."""
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
        return [entry for entry in self._all if isinstance(entry.event, kinds)]

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
        return [entry.event for entry in self._all if isinstance(entry.event, kinds)]

    @property
    def _all(self) -> list[Entry[LedgerEvent]]:
        return [*self._entries, *self._not_written_yet]

    @property
    def durations(self) -> Durations:
        """How long the last saves took; those during which the job was suspended do not count."""
        durations = Durations()
        for commit in self.events(CheckpointCommitted):
            if commit.took is not None and not commit.suspended:
                durations = durations.with_another(commit.took)
        return durations

    @property
    def last_step(self) -> int | None:
        """The step of the newest commit; None if there is none. Of a program with several loops the
        sum of what each has saved, as its ranks count their steps.

        Of one whose rank died before it could say so the next resume tells. A resume from an older
        one is no commit.
        """
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


def _parse_all(lines: Iterable[bytes]) -> list[Entry[LedgerEvent]]:
    parsed = (_parse_entry(line) for line in parse_lines(b"\n".join(lines)))
    return [entry for entry in parsed if entry is not None]


def _parse_entry(line: Mapping[str, Any]) -> Entry[LedgerEvent] | None:
    event = parse_event(line.get("event"), line)
    time, attempt = line.get("time", 0.0), line.get("attempt", 0)
    if event is None or not isinstance(time, int | float) or not isinstance(attempt, int):
        return None
    return Entry(event, time, attempt)
