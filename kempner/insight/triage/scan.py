"""Reads logs of any size line by line and collects a bounded number of findings. Among them are the
rank that is missing in a collective that timed out (it reports no error, or is behind), and the
network that each rank uses to other nodes, from NCCL's lines (NCCL_DEBUG=INFO)."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import chain, islice
from typing import Self

from kempner.insight.triage.ends import End, EndReader, expand_ranks
from kempner.insight.triage.log.lines import SAMPLE, LogLine, LogParser
from kempner.insight.triage.log.reading import Losses, StepsInLog
from kempner.insight.triage.log.tracebacks import (
    FoundException,
    Tracebacks,
    announces,
    is_handled,
    is_of_peer,
    is_tolerated,
    takes_back,
)
from kempner.insight.triage.places import Places
from kempner.insight.triage.rules import Blame, Cause, Sign, SignLevel, Sure
from kempner.insight.triage.table.everything import CAUSES, LITERALS, RAISED, TABLE, suspicious

_TIMED_OUT = re.compile(r"Watchdog caught collective operation timeout: WorkNCCL\(SeqNum=(\d+)")
_AT_WORK = re.compile(r"(?:at work|NCCL work): (\d+), last enqueued NCCL work: (-?\d+)")
_GLOO = re.compile(r"Timed out waiting \d+ ?ms for (?:send|recv) operation")
_SUBGROUP = re.compile(r"\[PG (?:ID )?(?P<id>[1-9]\d*)\b(?!.*default_pg)")
_DESYNC = re.compile(r"lagging/dead/mismatched ranks that caused the desync")
_LIST = re.compile(r"^\s*-\s*\[([\d, ]+)\]")


@dataclass(frozen=True)
class MissingRanks:
    """The ranks that others waited for, and the evidence."""

    ranks: tuple[int, ...]
    why: str


@dataclass
class Collectives:
    """Sequence numbers of collectives, by rank: of the one that timed out, and of the last
    begun."""

    stuck: dict[int, int] = field(default_factory=dict)
    begun: dict[int, int] = field(default_factory=dict)
    complained: set[int] = field(default_factory=set)
    named: tuple[int, ...] = ()
    _desync: bool = False

    def learn(self, line: LogLine) -> None:
        text, rank = line.text, line.rank
        if self._desync and (found := _LIST.match(text)) is not None:
            self.named, self._desync = expand_ranks(found[1]), False
        elif _DESYNC.search(text):
            self._desync = True
        if rank is None:
            return
        timed_out, at_work = _TIMED_OUT.search(text), _AT_WORK.search(text)
        if timed_out or at_work or _GLOO.search(text):
            self.complained.add(rank)
        if _SUBGROUP.search(text):
            return
        if timed_out is not None:
            self.stuck.setdefault(rank, int(timed_out[1]))
        if at_work is not None:
            self.stuck.setdefault(rank, int(at_work[1]))
            self.begun[rank] = int(at_work[2])

    def missing(self, world: int | None) -> MissingRanks | None:
        if self.named:
            return MissingRanks(self.named, "torch's own report names it as the one behind")
        if silent := self._silent(world):
            return MissingRanks(silent, "all others report the time-out")
        if behind := self._behind():
            furthest, at = max(self.stuck.values()), self._reached(behind[0])
            return MissingRanks(behind, f"it had got to collective {at}, others wait in {furthest}")
        return None

    def _silent(self, world: int | None) -> tuple[int, ...]:
        """Ranks that report no error, if most do. Where the number of ranks is not known, the log
        may lack whole nodes: then a single one among several counts."""
        if not self.complained:
            return ()
        size = min(world or max(self.complained) + 1, 100_000)
        silent = tuple(rank for rank in range(size) if rank not in self.complained)
        most = len(self.complained) - 1 if world else 1
        return silent if len(silent) <= most and len(self.complained) > 2 else ()

    def _behind(self) -> tuple[int, ...]:
        """Those that had not begun what others wait in."""
        furthest = max(self.stuck.values(), default=0)
        behind = tuple(sorted(r for r in self.stuck if self._reached(r) < furthest))
        return behind if 2 * len(behind) <= len(self.stuck) else ()

    def _reached(self, rank: int) -> int:
        return self.begun.get(rank, self.stuck[rank])


_CHANNEL = re.compile(
    r"(?:Channel|Ring) \d+(?:/\d+)? : (?P<a>\d+)\[[^]]*\] -> (?P<b>\d+)\[[^]]*\] "
    r"\[(?P<way>send|receive)\] via NET/(?P<net>[\w-]+)"
)
_NETWORK = re.compile(r"Using network (?P<net>[\w-]+)")


@dataclass
class Transports:
    """The networks of each rank: `IB`, `Socket`, or a plugin's name."""

    by_rank: dict[int, set[str]] = field(default_factory=dict)
    _by_process: dict[tuple[str, int], str] = field(default_factory=dict)

    def learn(self, line: LogLine) -> None:
        if (found := _CHANNEL.search(line.text)) is not None:
            rank = int(found["a"] if found["way"] == "send" else found["b"])
            self.by_rank.setdefault(rank, set()).add(found["net"])
        elif (found := _NETWORK.search(line.text)) is not None:
            if line.rank is not None:
                self.by_rank.setdefault(line.rank, set()).add(found["net"])
            elif line.node is not None and line.pid is not None:
                self._by_process[line.node, line.pid] = found["net"]

    def table(self, places: Places) -> dict[int, str]:
        """The network by rank, the slower of several."""
        for (node, pid), net in self._by_process.items():
            rank = places.rank_of(pid, node)
            if rank is not None:
                self.by_rank.setdefault(rank, set()).add(net)
        return {
            rank: "Socket" if "Socket" in nets else min(nets)
            for rank, nets in sorted(self.by_rank.items())
        }


KEPT = 48  # findings of a cause that are kept; the rest is counted
SURVIVED = 5  # training steps after which an earlier failure was survived

GOT_OVER = 3
"""Lines from an exception to the line of the same rank that says that the program goes on; without
a rank only the next line counts."""

CONTINUED = 8  # lines below an exception that may belong to its message


_BARE_OF_SOCKETS = {"unreachable", "name_resolution"}
"""Causes that the library which was using the socket reports again in its own words."""


@dataclass(frozen=True)
class About:
    """The subject of a line: ranks, or a process, and the node; empty if it names none.

    `frame` is the user's line of code, `status` the exit status, if the line reports one. `first`:
    torchrun saw this exit first on its node. `everywhere`: it concerns no single rank. `task`:
    `ranks` are numbers of srun's tasks.
    """

    ranks: tuple[int, ...] = ()
    node: str | None = None
    pid: int | None = None
    frame: str = ""
    status: int | None = None
    first: bool = False
    everywhere: bool = False
    task: bool = False

    @classmethod
    def writer(cls, line: LogLine, frame: str = "") -> Self:
        return cls(() if line.rank is None else (line.rank,), line.node, line.pid, frame)


@dataclass(frozen=True)
class LogFinding:
    """A line that matches a rule.

    `order` counts lines over all files; `steps` counts training steps before it; `doubtful`: the
    program may have handled it.
    """

    cause: Cause
    level: SignLevel
    sure: Sure
    line: LogLine
    order: int
    steps: int
    about: About
    doubtful: bool = False

    @property
    def ranks(self) -> tuple[int, ...]:
        return self.about.ranks

    @property
    def node(self) -> str | None:
        return self.about.node

    @property
    def status(self) -> int | None:
        return self.about.status


@dataclass
class LogFindings:
    _by_cause: dict[str, list[LogFinding]] = field(default_factory=dict)
    _last_raised: dict[object, LogFinding] = field(default_factory=dict)
    _last: dict[object, LogFinding] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)

    def __iter__(self) -> Iterator[LogFinding]:
        found = [finding for kept in self._by_cause.values() for finding in kept]
        return iter(sorted(found, key=lambda finding: finding.order))

    def add(self, finding: LogFinding, raised: bool = False) -> None:
        """Keep a finding. `raised`: it is an exception that matches no rule, which is replaced if
        lines below, such as parts of its message, match one.
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
            if finding.status is None and finding.level in (SignLevel.CAUSE, SignLevel.MECHANISM):
                self._last[writer] = finding
            if raised:
                self._last_raised[writer] = finding

    def handled(self, line: LogLine) -> None:
        """Drop the last exception of this writer: another one was raised while it was handled."""
        before = self._last_raised.pop(line.writer, None)
        if before is not None:
            self._forget(before)
        for name in _BARE_OF_SOCKETS.intersection(self._by_cause):
            kept = self._by_cause[name]
            kept[:] = [finding for finding in kept if finding.line.writer != line.writer]

    def tolerated(self, line: LogLine, order: int) -> None:
        """Drop the last finding of a writer that goes on after it."""
        before = self._last.pop(line.writer, None)
        near = 1 if line.rank is None else GOT_OVER
        if before is None or order - before.order > near:
            return
        self._forget(before)
        self._last_raised.pop(line.writer, None)

    def _forget(self, finding: LogFinding) -> None:
        kept = self._by_cause[finding.cause.name]
        kept[:] = [other for other in kept if other is not finding]


_FACTS = (
    *("NCCL", "nranks", "world", "RANK", "Failures:", "Root Cause", "COMPLETED", "desync", "  : "),
    *("- [", 'File "', "above exception", "terminated with", "TIMEOUT", "DEADLINE", "PREEMPTED"),
    *("FAIL", "ERROR", "atal", "FATAL", "CRITICAL", "panic", "etry", "ttempt", "kipping"),
    "gnoring",
)
"""Substrings of lines that report no failure and are needed nevertheless."""

_TELLING = (*LITERALS, *_FACTS)

BATCH = 64  # lines that are filtered together

_OWN = re.compile(
    r"kempner: rank (?P<rank>\d+) exited with code (?P<code>\d+)(?: \(\w+\))?"
    r"(?:: (?P<said>.+?))?(?: at step \d+)?(?:; restarting .*|\. \d+ attempts? .*)?$"
)
"""The line of kempner's supervisor about a rank that failed."""

_ERROR = re.compile(
    r"(?i)\b(?:\w*error|fatal|critical|\w*exception|failed|failure|abort\w*|panic|killed|refused|"
    r"cannot|could not|unable|denied|not found)\b"
)
_DIGITS = re.compile(r"\d+")

SHOWN = 12
"""Lines that are shown of a log that matches no rule."""


ENDING = 3  # last lines of all that are kept


@dataclass
class Suspects:
    """Lines that mention an error; those that differ only in numbers count as one."""

    first: dict[str, LogLine] = field(default_factory=dict)
    last: deque[LogLine] = field(default_factory=lambda: deque(maxlen=SHOWN))
    ending: deque[LogLine] = field(default_factory=lambda: deque(maxlen=ENDING))

    def learn(self, line: LogLine) -> None:
        key = _DIGITS.sub("#", line.text[:120])
        if key in self.first or line.warning or not _ERROR.search(line.text):
            return
        if len(self.first) < 50 * SHOWN:
            self.first[key] = line
            self.last.append(line)


class Scan:
    """Findings and facts from logs, which `read` adds."""

    def __init__(self) -> None:
        self.places = Places()
        self.transports = Transports()
        self.collectives = Collectives()
        self.findings = LogFindings()
        self.suspects = Suspects()
        self.lines = 0
        self.steps = StepsInLog()
        self.losses = Losses()
        self.sources: list[str] = []
        self._tracebacks = Tracebacks()
        self._ends = EndReader()
        self._time: float | None = None

    def read(self, source: str, texts: Iterable[str]) -> None:
        """Take in one file. Most lines are noise, and cost one look each."""
        self.sources.append(source)
        self._time = None
        stream = iter(texts)
        sample = list(islice(stream, SAMPLE))
        parser = LogParser(source, sample)
        numbered = enumerate(chain(sample, stream), start=1)
        while batch := list(islice(numbered, BATCH)):
            together = "\n".join(text for _, text in batch)
            telling = [word for word in _TELLING if word in together]
            for number, text in batch:
                self.lines += 1
                if self._tracebacks.waiting or any(map(text.__contains__, telling)):
                    for line in parser.parse(number, text):
                        self._add(line)
                else:
                    self._pass_by(source, number, text)
            last = [(number, text) for number, text in batch[-ENDING:] if text]
            self.suspects.ending.extend(LogLine(f"{source}:{n}", text) for n, text in last)
        self.steps.by_file[source] = self.steps.made
        self._tracebacks, self._ends = Tracebacks(), EndReader(self._ends.elastic)

    def _pass_by(self, source: str, number: int, text: str) -> None:
        """Take in a line without a relevant word: only its progress, and only where that is
        needed."""
        if self.findings.counts or self.places.uses:
            self.steps.count(text)
        if self.losses.since is not None and "oss" in text:
            self.losses.learn(LogLine(f"{source}:{number}", text), self.lines)

    def _add(self, line: LogLine) -> None:
        self._time = line.time if line.time is not None else self._time
        line = line if line.time is not None else replace(line, time=self._time)
        self.places.learn(line)
        if "NET/" in line.text or "network " in line.text:
            self.transports.learn(line)
        self.collectives.learn(line)
        self._judge(line)
        self.steps.count(line.text)
        if "oss" in line.text:
            self.losses.learn(line, self.lines)

    def _judge(self, line: LogLine) -> None:
        if is_handled(line):
            self.findings.handled(line)
        if not self._tracebacks.is_open(line) and is_tolerated(line.text):
            self._tolerated(line)
            return
        raised = self._tracebacks.feed(line, self.lines) or _of_kempner(line)
        if raised is not None and not raised.muted:
            self._raised(raised)
        if raised is not None:
            return
        self.suspects.learn(line)
        end = self._ends.feed(line)
        if end is not None:
            self._ended(end)
        elif suspicious(line.text) and (hit := match(line.text, line.warning)) is not None:
            self._signed(*hit, line, "")

    def _tolerated(self, line: LogLine) -> None:
        """Take in a line of a program that goes on, which may refer to a traceback right above or
        below."""
        if takes_back(line.text):
            self.findings.tolerated(line, self.lines)
        if announces(line.text):
            self._tracebacks.doubt(line, self.lines)
        self.suspects.learn(replace(line, warning=False))
        as_warning = replace(line, warning=True)
        if suspicious(line.text) and (hit := match(line.text, as_warning.warning)) is not None:
            self._signed(*hit, as_warning, "")

    def _ended(self, end: End) -> None:
        if end.node is not None and end.task:
            self.places.tasks.update(dict.fromkeys(end.ranks, end.node))
        elif end.node is not None:
            for rank in end.ranks:
                alone = len(end.ranks) == 1
                pid, local_rank = (end.line.pid, end.line.local_rank) if alone else (None, None)
                self.places.place(rank, end.node, pid, local_rank)
        about = About(
            end.ranks, end.node, end.line.pid, status=end.status, first=end.first, task=end.task
        )
        self.findings.add(self._found(CAUSES[end.cause], end.level, end.sure, end.line, about))

    def _raised(self, raised: FoundException) -> None:
        line, frame = raised.line, raised.frame
        if "terminated with" in raised.text and (end := self._ends.feed(line)) is not None:
            self._ended(end)
            return
        if (hit := match(raised.text, through=raised.through)) is not None:
            self._signed(*hit, line, frame, raised.doubtful)
            return
        level = SignLevel.SYMPTOM if is_of_peer(raised.text) else SignLevel.CAUSE
        level = SignLevel.CASCADE if raised.follows else level
        about = About.writer(line, frame)
        sure = Sure.CERTAIN if raised.own else Sure.LIKELY
        finding = self._found(RAISED, level, sure, line, about)
        self.findings.add(replace(finding, doubtful=raised.doubtful), raised=True)

    def _signed(
        self,
        sign: Sign,
        cause: Cause,
        found: re.Match[str],
        line: LogLine,
        frame: str,
        doubtful: bool = False,
    ) -> None:
        named = found.groupdict()
        about = About.writer(line, frame) if sign.blame is Blame.WRITER else About(frame=frame)
        if rank_list := named.get("ranks") or named.get("rank"):
            about = replace(about, ranks=expand_ranks(rank_list))
        if named.get("pid"):
            about = replace(about, pid=int(named["pid"]), ranks=())
        if address := named.get("address"):
            about = replace(about, node=self.places.addresses.get(address, address))
        if node := named.get("node"):
            about = replace(about, node=node)
        finding = self._found(cause, sign.level, sign.sure, line, about)
        self.findings.add(replace(finding, doubtful=doubtful))

    def _found(
        self, cause: Cause, level: SignLevel, sure: Sure, line: LogLine, about: About
    ) -> LogFinding:
        return LogFinding(cause, level, sure, line, self.lines, self.steps.made, about)


def match(
    text: str, warning: bool = False, through: str = ""
) -> tuple[Sign, Cause, re.Match[str]] | None:
    """The first sign of the table that matches this text; for a `warning` only signs that count
    there. `through` are the functions through which an exception came.
    """
    for sign, cause in TABLE:
        if warning and not sign.warned:
            continue
        found = sign.search(text, through)
        if found is not None:
            return sign, cause, found
    return None


def _of_kempner(line: LogLine) -> FoundException | None:
    """The exception of a rank, as its supervisor repeats it."""
    found = _OWN.search(line.text)
    if found is None:
        return None
    message = found["said"] or f"exited with code {found['code']}"
    return FoundException(replace(line, rank=int(found["rank"]), text=message), message)
