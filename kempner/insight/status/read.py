"""Reads what a run has on disk, and what Slurm says of its job: read only, and never all of it.

The end of a file of JSON lines, and what is added to it later: never the whole of a large one.

A run of weeks has a million lines of metrics and a ledger of tens of megabytes, on storage that the
run needs for itself.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from kempner.checkpoint.format.manifest import digest, read
from kempner.checkpoint.format.names import MANIFEST, CheckpointFolder
from kempner.checkpoint.io.verify import read_findings
from kempner.insight.owner import OwnerWatch
from kempner.insight.status.facts import CheckpointFacts, LiveState, Metrics, RankPlace, RunFacts
from kempner.insight.status.job import JobStatus, job_of, read_job
from kempner.run.process.exit_codes import DataError
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
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import parse_lines
from kempner.run.record.recorded_config import checkpoint_folder, live_attempt, total_steps
from kempner.run.record.run_dir import RunDirectory

FIRST_BLOCK, LARGEST_BLOCK = 128 << 10, 4 << 20
"""Bytes that are read at a time, from the end: at first, and at most."""

LIMIT = 64 << 20
"""Bytes that are read at most."""

Lines = list[dict[str, Any]]


class Tail:
    """Follows a file. `enough` looks at a block from its end, and says how much of what is wanted
    it holds; reading stops at `wanted` of it. `keep` says which of the lines are to be parsed.
    """

    def __init__(
        self,
        path: Path,
        enough: Callable[[bytes], int],
        wanted: int,
        keep: Callable[[list[bytes]], list[bytes]] = list,
    ) -> None:
        self._path, self._enough, self._wanted, self._keep = path, enough, wanted, keep
        self._file: tuple[int, int] | None = None
        self._read_up_to = 0
        self.whole = True
        """Whether the first line that was read is the first one of the file."""

    def read(self) -> tuple[Lines, bool]:
        """The lines that are new, and whether they take the place of all that was read before.

        No lines of a file that is not there yet. Raises `OSError` if it cannot be read now.
        """
        try:
            with self._path.open("rb") as file:
                return self._read(file)
        except FileNotFoundError:
            if self._file is not None:
                raise  # its storage is away
            return [], False

    def _read(self, file: BinaryIO) -> tuple[Lines, bool]:
        found = os.fstat(file.fileno())
        same = self._file == (found.st_dev, found.st_ino)
        grown = found.st_size - self._read_up_to
        follow = same and 0 <= grown <= LIMIT
        self._file = (found.st_dev, found.st_ino)
        if follow:
            file.seek(self._read_up_to)
            content = file.read(grown)
        else:
            content = self._read_back(file, found.st_size)
            self._read_up_to = found.st_size - len(content)
        torn = content[content.rfind(b"\n") + 1 :]
        if torn and not any(parse_lines(torn)):  # else only its newline is missing
            content = content[: -len(torn)]
        self._read_up_to += len(content)
        return list(parse_lines(b"\n".join(self._keep(content.splitlines())))), not follow

    def _read_back(self, file: BinaryIO, end: int) -> bytes:
        blocks, begin, block, found = list[bytes](), end, FIRST_BLOCK, 0
        while begin > 0 and found < self._wanted and end - begin < LIMIT:
            size = min(block, begin)
            begin, block = begin - size, min(2 * block, LARGEST_BLOCK)
            file.seek(begin)
            blocks.append(file.read(size))
            found += self._enough(blocks[-1])
        content = b"".join(reversed(blocks))
        self.whole = begin == 0
        return content if self.whole else content[content.find(b"\n") + 1 :]


T = TypeVar("T")
U = TypeVar("U")

ATTEMPTS = 6
"""Attempts that are read of the ledger, from its end."""

METRICS = 500
"""Lines of the metrics that are kept."""

KEPT = 200
"""Events that come in numbers, such as commits, that are read of them."""

ASK_EVERY = 10.0
"""Seconds between two questions to Slurm's controller, which serves the whole cluster."""

_EVENT = re.compile(rb'"event": "(\w+)"')
_MANY = frozenset(
    kind.name.encode()
    for kind in (CheckpointCommitted, Evaluated, StepSkipped, LossSpike, PhaseDurationsLearned)
)


class RunReader:
    """Reads a run again and again, each time only what is new.

    `patient` is whether to look twice at a lease of another machine, which takes seconds.
    """

    def __init__(self, run: RunDirectory, *, patient: bool = False) -> None:
        self.run, self._patient = run, patient
        self._ledger = Tail(run.ledger, _starts_in, ATTEMPTS, _keep_few)
        self._metrics = Tail(run.metrics, lambda block: 1, 1)
        self._lines: deque[Mapping[str, Any]] = deque(maxlen=METRICS)
        self.history = RunHistory()
        self._owner = OwnerWatch(run.supervisors)
        self._ranks = _RanksFile()
        self._unread: list[str] = []

    def read(self) -> RunFacts:
        """What is known now, but for what Slurm says.

        Raises `OSError` if the ledger cannot be read now. Anything else that cannot be is left
        unknown, and named in `unread`.
        """
        self._unread = []
        self._read_ledger()
        attempt = self._try(lambda: live_attempt(self.run), None)
        alive = self._try(self._owner.look if self._patient else self._owner.glance, None)
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

    def _try(self, ask: Callable[[], T], otherwise: U) -> T | U:
        try:
            return ask()
        except OSError as error:
            self._unread.append(f"{error.filename} cannot be read: {error.strerror}")
            return otherwise

    def _read_ledger(self) -> None:
        lines, anew = self._ledger.read()
        if anew:
            self.history = RunHistory()
            if not self._ledger.whole:  # the first attempt would be told of in part
                starts = (
                    n for n, line in enumerate(lines) if line.get("event") == AttemptStarted.name
                )
                lines = lines[next(starts, 0) :]
        self.history.add(lines)

    def _read_metrics(self) -> None:
        lines, anew = self._metrics.read()
        if anew:
            self._lines.clear()
        self._lines.extend(lines)

    def _places(self, attempt: Attempt | None) -> tuple[RankPlace, ...]:
        """What the supervisor of the live attempt last heard; nothing between two attempts."""
        ended = {entry.attempt for entry in self.history.entries(AttemptEnded)}
        if attempt is None or attempt.number in ended:
            return ()
        return self._ranks.read(self.run, attempt.number)

    def _checkpoint(self, folder: CheckpointFolder) -> CheckpointFacts | None:
        """By its link; by the ledger where that cannot be seen from here, or not now."""
        step = self._try(lambda: folder.latest() if folder.path.exists() else None, None)
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
        """When `kempner checkpoint verify` read it, and how many files were damaged."""
        findings = read_findings(folder.path)
        if not findings:
            return None  # which spares reading the manifest of a large world
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
    """All lines but those that come in numbers, of which the last ones."""
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


class _RanksFile:
    """`ranks.json`, parsed once for each version of it: thousands of ranks take a while."""

    def __init__(self) -> None:
        self._version: tuple[int, int, int] | None = None
        self._places: tuple[RankPlace, ...] = ()

    def read(self, run: RunDirectory, attempt: int) -> tuple[RankPlace, ...]:
        """What the file of an attempt says; nothing where it is not written yet."""
        path = run.ranks(attempt)
        try:
            stat = path.stat()
            version = (attempt, stat.st_mtime_ns, stat.st_ino)
            if version != self._version:
                self._places = _PLACES.validate_json(path.read_bytes())
                self._version = version
        except (FileNotFoundError, ValidationError):
            return ()
        return self._places


class JobWatch:
    """Asks Slurm about a run's job, now and then.

    With `wait` its answer is waited for, and asked for again for `within` seconds; otherwise a
    controller that is away holds nothing up.
    """

    def __init__(
        self, job: str | None, *, accounting: bool = False, within: float = 0.0, wait: bool
    ) -> None:
        self.named, self._accounting, self._within, self._wait = job, accounting, within, wait
        self._due_at = 0.0
        self._found: JobStatus | None = None
        self._asking: threading.Thread | None = None

    def look(self, history: RunHistory) -> JobStatus | None:
        """What Slurm has said, ten seconds ago at most; None outside of Slurm, or not yet."""
        job = self.named or job_of(history)
        if job is None:
            return None
        if self._found is not None and self._found.job != job:
            self._found, self._due_at = None, 0.0
        if time.monotonic() >= self._due_at and (not self._asking or not self._asking.is_alive()):
            self._due_at = time.monotonic() + ASK_EVERY
            ask = partial(self._ask, job, history)
            if self._wait:
                ask()
            else:
                self._asking = threading.Thread(target=ask, name="job", daemon=True)
                self._asking.start()
        return self._found

    def _ask(self, job: str, history: RunHistory) -> None:
        self._found = read_job(job, history, self._accounting, self._within)


def _starts_in(block: bytes) -> int:
    """How many attempts begin in these lines."""
    return block.count(f'"event": "{AttemptStarted.name}"'.encode())
