"""Reports of ranks that do not use kempner, from their heartbeat files and the program's progress
file."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from kempner.config.sections import ProgramSection
from kempner.run.control.heartbeat_file import LONGEST, Heartbeat, parse
from kempner.run.control.protocol import Moves, Phase, Report
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.threads import keep_running
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.policy.outcome import RankExit, failed, interpret

EVERY = 1.0
"""Seconds between two looks at the files."""

FRESH_WITHIN = 2.0
"""Seconds that a caller waits for a fresh look: storage may hang."""


class LastReport(NamedTuple):
    """A rank's newest report, and when it arrived (`time.monotonic`, seconds)."""

    report: Report
    at: float


@dataclass(frozen=True)
class FileSeen:
    """A file at the last look: its modification time, its contents, and how often it has changed
    (`moves`)."""

    changed: int
    heartbeat: Heartbeat | None
    moves: int = 0

    def after(self, changed: int, heartbeat: Heartbeat | None) -> FileSeen:
        """The file at the next look. Contents that cannot be parsed count as a move, and leave the
        step."""
        if changed == self.changed:
            return self
        known = self.heartbeat if heartbeat is None else heartbeat
        if known is not None and self.heartbeat is not None:
            known = replace(known, complete=known.complete or self.heartbeat.complete)
        return FileSeen(changed, known, self.moves + 1)

    def report(self) -> Report:
        """As a rank's report; moves without a step count as tries."""
        step = None if self.heartbeat is None else self.heartbeat.step
        phase = Phase.STEP if self.moves else Phase.START
        tries = 0 if step is not None else self.moves
        return Report(step or 0, phase, 0.0, 0.0, moves=Moves(tries))


class ProgramReports:
    """Reads the files of an attempt of `size` ranks, in a thread, since storage may hang.

    The program's progress file stands for rank 0 until rank 0 has a heartbeat. If the program is
    configured to show progress, rank 0 counts as starting until a file changes."""

    def __init__(
        self, run: RunDirectory, attempt: int, size: int, section: ProgramSection | None
    ) -> None:
        self._files = {run.heartbeat(attempt, rank): rank for rank in range(size)}
        self._folder, self._section = run.attempt(attempt), section
        self._seen: dict[int, FileSeen] = {}
        self._of_program: FileSeen | None = None
        self._over: set[int] = set()
        self._asked, self._looks = threading.Event(), threading.Condition()
        self._begun = self._done = 0
        self._closed = section is None

    def start(self) -> None:
        """Start to look. Of a progress file that exists already, only changes count."""
        if self._closed:
            return
        if (path := self._program_file) is not None and (found := _look_at(path)) is not None:
            self._of_program = FileSeen(found[0], None)
        keep_running("program", self._serve)

    def close(self) -> None:
        """Look a last time."""
        self.refresh()
        self._closed = True
        self._asked.set()

    def refresh(self) -> None:
        """Wait for another look at all files, at most `FRESH_WITHIN` seconds."""
        if self._closed:
            return
        with self._looks:
            wanted = self._begun + 1
            self._asked.set()
            self._looks.wait_for(lambda: self._done >= wanted, FRESH_WITHIN)

    def interpret(self, end: RankExit, *, look: bool) -> RankExit:
        """`end` with its meaning; `look` at the files again before it counts as a failure."""
        if self._section is None:
            return end
        meaning = interpret(end, self._section, self.complete)
        if look and failed(meaning):
            self.refresh()
            meaning = interpret(end, self._section, self.complete)
        if meaning.code == ExitCode.COMPLETED:
            self._over.add(end.rank)  # it no longer moves, which is no hang
        return meaning

    @property
    def complete(self) -> bool:
        """Whether a file says that the run is complete."""
        return any(seen.heartbeat is not None and seen.heartbeat.complete for seen in self._all())

    @property
    def furthest_step(self) -> int | None:
        """The largest step in the files; None if there is none."""
        steps = (seen.heartbeat.step for seen in self._all() if seen.heartbeat is not None)
        return max((step for step in steps if step is not None), default=None)

    def reports(self) -> Mapping[int, LastReport]:
        """The reports of the ranks, without those that are complete."""
        now = time.monotonic()
        seen = dict(self._seen)
        if self._of_program is not None and self._of_program.moves:
            seen.setdefault(0, self._of_program)
        if not seen and self._section is not None and self._section.tells_progress:
            seen[0] = FileSeen(0, None)
        return {
            rank: LastReport(file.report(), now)
            for rank, file in sorted(seen.items())
            if rank not in self._over
        }

    def _all(self) -> list[FileSeen]:
        return [*self._seen.values(), *([self._of_program] if self._of_program else [])]

    @property
    def _program_file(self) -> Path | None:
        named = None if self._section is None else self._section.progress_file
        return None if named is None else Path(named)

    def _serve(self) -> None:
        while not self._closed:
            self._asked.wait(EVERY)
            self._asked.clear()
            with self._looks:
                self._begun += 1
            try:
                self._look()
            except OSError as error:
                logger().info("cannot look for heartbeats", error=error.strerror)
            with self._looks:
                self._done = self._begun
                self._looks.notify_all()

    def _look(self) -> None:
        for path in self._folder.iterdir():
            rank = self._files.get(path)
            if rank is not None and (found := _look_at(path)) is not None:
                before = self._seen.get(rank, FileSeen(-1, None))
                self._seen[rank] = before.after(*found)
        named = self._program_file
        if named is not None and (found := _look_at(named)) is not None:
            self._of_program = (self._of_program or FileSeen(-1, None)).after(*found)


def _look_at(path: Path) -> tuple[int, Heartbeat | None] | None:
    """A file's modification time and contents; None if it does not exist or cannot be read now."""
    try:
        with path.open("rb") as file:
            head = file.read(LONGEST + 1)
        heartbeat = parse(head.decode(errors="replace")) if len(head) <= LONGEST else None
        return path.stat().st_mtime_ns, heartbeat
    except OSError:
        return None
