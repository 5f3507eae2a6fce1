"""Reads logs line by line and collects what may matter; no log is too long for it."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import chain, islice

from kempner.insight.triage.collectives import Collectives
from kempner.insight.triage.ends import End, EndReader, spread_out
from kempner.insight.triage.findings import About, Finding, Findings
from kempner.insight.triage.log.lines import SAMPLE, LogLine, LogParser
from kempner.insight.triage.log.progress import Losses, Steps
from kempner.insight.triage.log.tolerated import announces, is_tolerated, takes_back
from kempner.insight.triage.log.tracebacks import Raised, Tracebacks, is_handled, is_of_peer
from kempner.insight.triage.places import Places
from kempner.insight.triage.rules import Blame, Cause, Level, Sign, Sure
from kempner.insight.triage.table.everything import CAUSES, LITERALS, TABLE, suspicious
from kempner.insight.triage.table.program import RAISED
from kempner.insight.triage.transports import Transports

_FACTS = (
    *("NCCL", "nranks", "world", "RANK", "Failures:", "Root Cause", "COMPLETED", "desync", "  : "),
    *("- [", 'File "', "above exception", "terminated with", "TIMEOUT", "DEADLINE", "PREEMPTED"),
    *(
        "FAIL",
        "ERROR",
        "atal",
        "FATAL",
        "CRITICAL",
        "panic",
        "etry",
        "ttempt",
        "kipping",
        "gnoring",
    ),
)
"""What lines have in them that tell no failure, and are read nevertheless."""

_TELLING = (*LITERALS, *_FACTS)

BATCH = 64
"""Lines that are looked at together, before each is looked at by itself."""

_OWN = re.compile(
    r"kempner: rank (?P<rank>\d+) exited with code (?P<code>\d+)(?: \(\w+\))?"
    r"(?:: (?P<said>.+?))?(?: at step \d+)?(?:; restarting .*|\. \d+ attempts? .*)?$"
)
"""What kempner's supervisor prints of a rank that failed."""

_ERROR = re.compile(
    r"(?i)\b(?:\w*error|fatal|critical|\w*exception|failed|failure|abort\w*|panic|killed|refused|"
    r"cannot|could not|unable|denied|not found)\b"
)
_DIGITS = re.compile(r"\d+")

SHOWN = 12
"""Most likely lines that are kept for a log that no rule knows, from its begin and from its end."""


ENDING = 3
"""Last lines of all that are kept."""


@dataclass
class Suspects:
    """Lines that speak of an error; those that differ in numbers alone count as one."""

    first: dict[str, LogLine] = field(default_factory=dict)
    last: deque[LogLine] = field(default_factory=lambda: deque(maxlen=SHOWN))
    ending: deque[LogLine] = field(default_factory=lambda: deque(maxlen=ENDING))

    def learn(self, line: LogLine) -> None:
        """Keep it if it is new."""
        key = _DIGITS.sub("#", line.text[:120])
        if key in self.first or line.warning or not _ERROR.search(line.text):
            return
        if len(self.first) < 50 * SHOWN:
            self.first[key] = line
            self.last.append(line)


class Scan:
    """All that was learnt from logs. Feed it with `read`."""

    def __init__(self) -> None:
        self.places = Places()
        self.transports = Transports()
        self.collectives = Collectives()
        self.findings = Findings()
        self.suspects = Suspects()
        self.lines = 0
        self.steps = Steps()
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
            ending = [
                LogLine(f"{source}:{number}", text) for number, text in batch[-ENDING:] if text
            ]
            self.suspects.ending.extend(ending)
        self.steps.by_file[source] = self.steps.made
        self._tracebacks, self._ends = Tracebacks(), EndReader(self._ends.elastic)

    def _pass_by(self, source: str, number: int, text: str) -> None:
        """A line without a word that tells: only of progress, and only where that may matter."""
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
        """What the program gets over: a traceback right above or below this line, too."""
        if takes_back(line.text):
            self.findings.tolerated(line, self.lines)
        if announces(line.text):
            self._tracebacks.doubt(line, self.lines)
        self.suspects.learn(replace(line, warning=False))
        told = replace(line, warning=True)
        if suspicious(line.text) and (hit := match(line.text, told.warning)) is not None:
            self._signed(*hit, told, "")

    def _ended(self, end: End) -> None:
        if end.node is not None:
            for rank in end.ranks:
                alone = len(end.ranks) == 1
                pid, local_rank = (end.line.pid, end.line.local_rank) if alone else (None, None)
                self.places.place(rank, end.node, pid, local_rank)
        about = About(end.ranks, end.node, end.line.pid, status=end.status, first=end.first)
        self.findings.add(self._found(CAUSES[end.cause], end.level, end.sure, end.line, about))

    def _raised(self, raised: Raised) -> None:
        line, frame = raised.line, raised.frame
        if "terminated with" in raised.text and (end := self._ends.feed(line)) is not None:
            self._ended(end)
            return
        hit = match(raised.text)
        if hit is not None:
            self._signed(*hit, line, frame, raised.doubtful)
            return
        level = Level.SYMPTOM if is_of_peer(raised.text) else Level.CAUSE
        level = Level.CASCADE if raised.follows else level
        about = About.writer(line, frame)
        finding = self._found(RAISED, level, Sure.CERTAIN, line, about)
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
        if said := named.get("ranks") or named.get("rank"):
            about = replace(about, ranks=spread_out(said))
        if named.get("pid"):
            about = replace(about, pid=int(named["pid"]), ranks=())
        if address := named.get("address"):
            about = replace(about, node=self.places.addresses.get(address, address))
        if node := named.get("node"):
            about = replace(about, node=node)
        finding = self._found(cause, sign.level, sign.sure, line, about)
        self.findings.add(replace(finding, doubtful=doubtful))

    def _found(
        self, cause: Cause, level: Level, sure: Sure, line: LogLine, about: About
    ) -> Finding:
        return Finding(cause, level, sure, line, self.lines, self.steps.made, about)


def match(text: str, warning: bool = False) -> tuple[Sign, Cause, re.Match[str]] | None:
    """The first row of the table that knows this text; of a `warning` only those that may."""
    for sign, cause in TABLE:
        if warning and not sign.warned:
            continue
        found = sign.regex.search(text)
        if found is not None:
            return sign, cause, found
    return None


def _of_kempner(line: LogLine) -> Raised | None:
    """What a rank raised, as its supervisor repeats it."""
    found = _OWN.search(line.text)
    if found is None:
        return None
    said = found["said"] or f"exited with code {found['code']}"
    return Raised(replace(line, rank=int(found["rank"]), text=said), said)
