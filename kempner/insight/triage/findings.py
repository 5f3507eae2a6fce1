"""What was found in a log that may matter, bounded in number."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Self

from kempner.insight.triage.log.lines import LogLine
from kempner.insight.triage.rules import Cause, Level, Sure

KEPT = 48
"""Findings of a cause that are kept; the rest is counted."""

SURVIVED = 5
"""Steps that the training makes after something that it survives."""

GOT_OVER = 3
"""Lines from an exception to the line of that rank that says that the program goes on; of a writer
who does not say who it is, only the next one counts."""

CONTINUED = 8
"""Lines below an exception that may belong to its message."""


_BARE_OF_SOCKETS = {"unreachable", "name_resolution"}
"""What a socket says, and the library that was using it then says in its own words."""


@dataclass(frozen=True)
class About:
    """Whom a line is about, empty where that is nobody: ranks, or a process, and the node.

    `frame` is the user's line of code, `status` how the process ended, if the line tells an end,
    and `first` that torchrun saw this end first on its node. `everywhere`: it is no single rank's.
    """

    ranks: tuple[int, ...] = ()
    node: str | None = None
    pid: int | None = None
    frame: str = ""
    status: int | None = None
    first: bool = False
    everywhere: bool = False

    @classmethod
    def writer(cls, line: LogLine, frame: str = "") -> Self:
        """Whoever wrote the line."""
        return cls(() if line.rank is None else (line.rank,), line.node, line.pid, frame)


@dataclass(frozen=True)
class Finding:
    """A line that a rule knows.

    `order` counts lines over all files; `steps` is how many the training had made by then;
    `doubtful` says that the program may have got over it.
    """

    cause: Cause
    level: Level
    sure: Sure
    line: LogLine
    order: int
    steps: int
    about: About
    doubtful: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        """Those that it is about."""
        return self.about.ranks

    @property
    def node(self) -> str | None:
        """Theirs."""
        return self.about.node

    @property
    def status(self) -> int | None:
        """How the process ended, if this tells an end."""
        return self.about.status


@dataclass
class Findings:
    """Those of a log, in its order."""

    _by_cause: dict[str, list[Finding]] = field(default_factory=dict)
    _last_raised: dict[object, Finding] = field(default_factory=dict)
    _last: dict[object, Finding] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[Finding]:
        found = [finding for kept in self._by_cause.values() for finding in kept]
        return iter(sorted(found, key=lambda finding: finding.order))

    def add(self, finding: Finding, raised: bool = False) -> None:
        """Keep it. `raised` says that it is an exception that no rule knows.

        One that lines below explain, as parts of its message do, gives way to them.
        """
        writer = finding.line.writer
        before = self._last_raised.pop(writer, None)
        near = before is not None and finding.order - before.order <= CONTINUED
        explains = near and not raised and not finding.cause.ends_from_outside
        if before is not None and explains and finding.level <= before.level:
            self._forget(before)
            about = replace(finding.about, frame=finding.about.frame or before.about.frame)
            finding = replace(finding, about=about, order=before.order)
        kept = self._by_cause.setdefault(finding.cause.name, [])
        self.counts[finding.cause.name] += 1
        if len(kept) >= KEPT:
            kept[:] = [old for old in kept if finding.steps - old.steps < SURVIVED]
        if len(kept) < KEPT:
            kept.append(finding)
            if finding.status is None and finding.level in (Level.CAUSE, Level.MECHANISM):
                self._last[writer] = finding
            if raised:
                self._last_raised[writer] = finding

    def handled(self, line: LogLine) -> None:
        """The last exception of this writer was handled: another came of it, and says more."""
        before = self._last_raised.pop(line.writer, None)
        if before is not None:
            self._forget(before)
        for name in _BARE_OF_SOCKETS.intersection(self._by_cause):
            kept = self._by_cause[name]
            kept[:] = [finding for finding in kept if finding.line.writer != line.writer]

    def tolerated(self, line: LogLine, order: int) -> None:
        """The writer goes on after what it has just told."""
        before = self._last.pop(line.writer, None)
        near = 1 if line.rank is None else GOT_OVER
        if before is None or order - before.order > near:
            return
        self._forget(before)
        self._last_raised.pop(line.writer, None)

    def _forget(self, finding: Finding) -> None:
        kept = self._by_cause[finding.cause.name]
        kept[:] = [other for other in kept if other is not finding]
