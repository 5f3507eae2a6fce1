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

CONTINUED = 8
"""Lines below an exception that may belong to its message."""


@dataclass(frozen=True)
class About:
    """Whom a line is about, empty where that is nobody: ranks, or a process, and the node.

    `frame` is the user's line of code, `status` how the process ended, if the line tells an end.
    """

    ranks: tuple[int, ...] = ()
    node: str | None = None
    pid: int | None = None
    frame: str = ""
    status: int | None = None

    @classmethod
    def writer(cls, line: LogLine, frame: str = "") -> Self:
        """Whoever wrote the line."""
        return cls(() if line.rank is None else (line.rank,), line.node, line.pid, frame)


@dataclass(frozen=True)
class Finding:
    """A line that a rule knows.

    `order` counts lines over all files; `steps` is how many the training had made by then; `first`
    says that torchrun saw this end first on its node.
    """

    cause: Cause
    level: Level
    sure: Sure
    line: LogLine
    order: int
    steps: int
    about: About
    first: bool = False

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
        near = before is not None and finding.order - before.order <= CONTINUED and not raised
        if before is not None and near and finding.level <= before.level:
            self._by_cause[before.cause.name].remove(before)
            about = replace(finding.about, frame=finding.about.frame or before.about.frame)
            finding = replace(finding, about=about, order=before.order)
        kept = self._by_cause.setdefault(finding.cause.name, [])
        self.counts[finding.cause.name] += 1
        if len(kept) >= KEPT:
            kept[:] = [old for old in kept if finding.steps - old.steps < SURVIVED]
        if len(kept) < KEPT:
            kept.append(finding)
            if raised:
                self._last_raised[writer] = finding

    def handled(self, line: LogLine) -> None:
        """The last exception of this writer was handled: another came of it."""
        before = self._last_raised.pop(line.writer, None)
        if before is not None:
            self._by_cause[before.cause.name].remove(before)
