"""Reads the files of a run into one value, from which all views are made.

A run of weeks has a million lines of metrics and a ledger of tens of megabytes, on storage that the
run itself needs: only the end of both is read, except for a view of the whole run.
"""

from __future__ import annotations

import re
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from kempner.checkpoint.format.manifest import digest, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.io.verify import read_findings
from kempner.checkpoint.store.selection import newest
from kempner.insight.attempts import AttemptFacts, attempts_of
from kempner.insight.status.job import JobStatus
from kempner.run.process.exit_codes import DataError
from kempner.run.process.threads import AwakeClock
from kempner.run.record import gave_up
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import (
    AttemptEnded,
    AttemptStarted,
    CheckpointCommitted,
    Evaluated,
    LossSpike,
    PhaseDurationsLearned,
    Resumed,
    StepSkipped,
)
from kempner.run.record.gave_up import GaveUp
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import (
    RELEASED,
    RENEWALS,
    Holder,
    LeaseReading,
    holder_lives,
    is_owned,
    look,
)
from kempner.run.record.ledger import FileTail, parse_lines
from kempner.run.record.recorded_config import checkpoint_folder, live_attempt, total_steps
from kempner.run.record.run_dir import RunDirectory


@dataclass(frozen=True)
class RankPlace:
    """The last report of a rank to its supervisor. `worked` and `waited` are seconds of its
    attempt, as in `Report`; `waiting` and `storage` are what it waits for, empty if it does not."""

    rank: int
    step: int
    phase: str
    worked: float = 0.0
    waited: float = 0.0
    waiting: str = ""
    storage: str = ""


@dataclass(frozen=True)
class CheckpointFacts:
    """The newest checkpoint, committed at `time` (Unix seconds, None if unknown). A full
    verification at `verified_at` found `damaged` damaged files."""

    step: int
    time: float | None = None
    verified_at: float | None = None
    damaged: int = 0
    loaded: bool = False
    """Whether the run resumed from it, which checked every byte that the ranks needed."""


@dataclass(frozen=True)
class LiveState:
    """Whether a run has an owner (`alive`, None if unknown), the number of the last `attempt`
    begun, and the state of its ranks."""

    alive: bool | None = None
    attempt: int | None = None
    ranks: Sequence[RankPlace] = ()


@dataclass(frozen=True)
class Metrics:
    lines: Sequence[Mapping[str, Any]] = ()
    total_steps: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """A run at `now`, in seconds since the epoch; None where unknown. `history` may begin in the
    middle of the run. `job` is Slurm's state of the job, `unread` are sentences on what could not
    be read now."""

    now: float
    history: RunHistory = field(default_factory=RunHistory)
    live: LiveState = LiveState()
    metrics: Metrics = Metrics()
    checkpoint: CheckpointFacts | None = None
    job: JobStatus | None = None
    gave_up: GaveUp | None = None
    unread: Sequence[str] = ()

    @cached_property
    def attempts(self) -> tuple[AttemptFacts, ...]:
        """The attempts in the history, by number: by time, a clock that was set back would change
        the order."""
        return tuple(sorted(attempts_of(self.history, {}), key=lambda attempt: attempt.number))


MISSED = 3  # missed renewals after which an owner counts as dead, as in `is_owned`

LONG_AGO = 3600.0
"""Seconds since the last renewal after which a run has no owner, even if the clocks differ."""


def judge_lease(seen: LeaseReading, age: float, unchanged_for: float) -> bool | None:
    """Whether the owner on another machine is alive; None if that takes a longer look. `age` is the
    seconds since the lease was renewed, by the clocks of two machines; `unchanged_for` the seconds
    for which this one has seen no change."""
    if seen.beat == RELEASED or seen.holder is None:
        return False
    patience = MISSED * seen.holder.lasts / RENEWALS
    if 0 <= age <= patience:
        return True
    if unchanged_for > patience or age > LONG_AGO:
        return False
    return None


class OwnerWatch:
    """Looks at the lease of a run now and then, and remembers when it last changed."""

    def __init__(self, folder: Path, now: Callable[[], float] = time.time) -> None:
        self._folder, self._now, self._clock = folder, now, AwakeClock()
        self._seen: LeaseReading | None = None
        self._since = 0.0

    def glance(self) -> bool | None:
        """Whether the owner is alive, as far as known without waiting. Raises `OSError` if the
        lease cannot be read now."""
        try:
            seen = look(self._folder)
        except (FileNotFoundError, NotADirectoryError):
            return False
        if seen is None:
            return False
        holder = seen.holder
        here = holder is not None and holder.machine == Holder.here(holder.lasts).machine
        if seen.beat != RELEASED and holder is not None and here:
            return holder_lives(holder)
        moved = self._seen is not None and seen != self._seen
        if self._seen is None or moved:
            self._seen, self._since = seen, self._clock.now()
        if moved and seen.beat != RELEASED:
            return True
        age = self._now() - (self._folder / str(seen.number)).stat().st_mtime
        return judge_lease(seen, age, self._clock.now() - self._since)

    def look(self) -> bool | None:
        """As `glance`, but watch the lease for seconds if needed."""
        found = self.glance()
        return is_owned(self._folder) if found is None else found


T = TypeVar("T")
U = TypeVar("U")

ATTEMPTS = 6  # attempts to read from the end of the ledger
METRICS = 500  # lines of the metrics that are kept
KEPT = 200  # events of the kinds in `_MANY` to keep

_EVENT = re.compile(rb'"event": "(\w+)"')
_MANY = frozenset(
    kind.name.encode()
    for kind in (CheckpointCommitted, Evaluated, StepSkipped, LossSpike, PhaseDurationsLearned)
)


class RunReader:
    """Follows a run: each `read` reads only new data, at first the end of its ledger, or the
    `whole` one. `patient` allows watching the lease of another machine for seconds."""

    def __init__(self, run: RunDirectory, *, patient: bool = False, whole: bool = False) -> None:
        self.run, self._patient = run, patient
        starts = f'"event": "{AttemptStarted.name}"'.encode()
        end = FileTail(run.ledger, lambda block: block.count(starts), ATTEMPTS, _keep_few)
        self.history = RunHistory(tail=FileTail(run.ledger) if whole else end)
        self._metrics = FileTail(run.metrics, lambda block: 1)
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=METRICS)
        self._owner = OwnerWatch(run.supervisors)
        self._version: tuple[int, int, int] | None = None
        self._last_places: tuple[RankPlace, ...] = ()
        self._unread: list[str] = []

    def read(self) -> RunFacts:
        """The facts, without Slurm's. Raises `OSError` if the ledger cannot be read now; other
        files that cannot be read are named in `unread`."""
        self._unread = []
        self.history.read_on()
        attempt = self._try(lambda: live_attempt(self.run), None)
        alive = self.is_alive(patient=self._patient)
        self._try(self._read_metrics, None)
        folder = self._try(lambda: CheckpointFolder(checkpoint_folder(self.run)), None)
        places = self._try(lambda: self._places(attempt), ()) if alive else ()
        return RunFacts(
            now=time.time(),
            history=self.history,
            live=LiveState(alive, None if attempt is None else attempt.number, places),
            metrics=Metrics(tuple(self._lines), self._try(lambda: total_steps(self.run), None)),
            checkpoint=None if folder is None else self._checkpoint(folder),
            gave_up=self._try(lambda: gave_up.read(self.run), None),
            unread=tuple(self._unread),
        )

    def is_alive(self, *, patient: bool) -> bool | None:
        return self._try(self._owner.look if patient else self._owner.glance, None)

    def _try(self, ask: Callable[[], T], otherwise: U) -> T | U:
        try:
            return ask()
        except OSError as error:
            self._unread.append(f"{error.filename} cannot be read: {error.strerror}")
            return otherwise

    def _read_metrics(self) -> None:
        lines, anew = self._metrics.read()
        if anew:
            self._lines.clear()
        self._lines.extend(parse_lines(b"\n".join(lines)))

    def _places(self, attempt: Attempt | None) -> tuple[RankPlace, ...]:
        """The last reports that the supervisor of the live attempt wrote; empty between
        attempts."""
        ended = {entry.attempt for entry in self.history.entries(AttemptEnded)}
        if attempt is None or attempt.number in ended:
            return ()
        path = self.run.ranks(attempt.number)
        try:
            stat = path.stat()
            version = (attempt.number, stat.st_mtime_ns, stat.st_ino)
            if version != self._version:  # thousands of ranks take a while to parse
                self._last_places = _PLACES.validate_json(path.read_bytes())
                self._version = version
        except (FileNotFoundError, ValidationError):
            return ()
        return self._last_places

    def _checkpoint(self, folder: CheckpointFolder) -> CheckpointFacts | None:
        """The newest checkpoint by its folder; by the ledger if the folder cannot be read here."""
        step = self._try(lambda: newest(folder) if folder.path.exists() else None, None)
        step = self.history.last_step_in("") if step is None else step
        if step is None:
            return None
        commits = self.history.entries(CheckpointCommitted)
        times = [entry.time for entry in commits if entry.event.step == step]
        time_ = times[-1] if times else self._try(lambda: _changed(folder, step), None)
        loaded = any(event.step == step for event in self.history.events(Resumed))
        found = self._try(lambda: self._finding(folder, step), None)
        when, damaged = (None, 0) if found is None else found
        return CheckpointFacts(step, time_, when, damaged, loaded)

    def _finding(self, folder: CheckpointFolder, step: int) -> tuple[float, int] | None:
        """When `kempner checkpoint verify` last read it, and the number of damaged files."""
        findings = read_findings(folder.path)
        if not findings:
            return None  # saves reading the manifest of a large world
        try:
            found = findings.get(digest(read(folder.step(step))))
        except DataError:
            return None
        return None if found is None else (found.time, found.damaged)


def _changed(folder: CheckpointFolder, step: int) -> float | None:
    try:
        return (folder.step(step) / MANIFEST).stat().st_mtime
    except (FileNotFoundError, NotADirectoryError):
        return None


def _keep_few(lines: list[bytes]) -> list[bytes]:
    """All lines, but of the kinds in `_MANY` only the last `KEPT`."""
    kept, many = [], 0
    for line in reversed(lines):
        name = _EVENT.search(line, 0, 200)
        if name is not None and name[1] in _MANY:
            many += 1
            if many > KEPT:
                continue
        kept.append(line)
    return kept[::-1]


_PLACES = TypeAdapter(tuple[RankPlace, ...])
