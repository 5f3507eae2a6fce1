"""Reads the lines of a log of any size in bounded memory, and finds training steps and losses in
them."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from kempner.insight.triage.log.lines import LogLine

BLOCK = 1 << 20  # bytes read at a time
LONGEST = 8192  # bytes of a line that are searched

_BREAK = re.compile(rb"\r\n|\n|\r")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BOX = re.compile(r"^[\s│┃|]*[│┃]\s?|\s*[│┃]\s*$")


def read_log(path: Path) -> Iterator[str]:
    """The lines without colours, including those that a progress bar overwrites. Raises `OSError`
    if the file cannot be read.
    """
    with path.open("rb") as file:
        content: IO[bytes] = file
        if path.suffix == ".gz":
            content = cast(IO[bytes], gzip.GzipFile(fileobj=file))
        for line in _split(content):
            yield _plain(line)


def _split(file: IO[bytes]) -> Iterator[bytes]:
    rest = b""
    while block := file.read(BLOCK):
        *lines, rest = _BREAK.split(rest + block)
        yield from lines
        rest = rest[:LONGEST]
    if rest:
        yield rest


def _plain(line: bytes) -> str:
    text = line[:LONGEST].decode("utf-8", errors="replace").rstrip()
    if "\x1b" in text:
        text = _ESCAPE.sub("", text)
    return _BOX.sub("", text) if "│" in text or "┃" in text else text


_STEPS = (
    re.compile(r"(?i)(?P<of>\|\s*)?\b(?P<step>\d+)/\d+ \[\d+:\d+"),  # a progress bar
    re.compile(
        r"(?i)\b(?P<of>steps?|iter(?:ation)?s?|its?|updates?|upd|batch|batches)\b\W{0,4}"
        r"(?P<step>\d+)\b"
    ),
    re.compile(r"(?P<of>\[)\s*(?P<step>\d+)\].*\bloss\b"),
    re.compile(r"(?i)\b(?P<of>epoch)\b\W{0,3}(?P<step>\d+)"),
)
"""Forms of a step's number; the first that matches counts."""

_LOSS = re.compile(
    r"(?i)(?<![\w/])(?:train(?:ing)?[/_. ])?(?:[lm]m[_ ]|total[_ ])?"
    r"loss(?:_step)?(?:\W{1,4}|\s+is\s+)"
    r"(?P<value>nan\b|[-+]?inf(?:inity)?\b|[-+]?\d)"
)
_NOT_TRAINING = re.compile(r"(?i)\b(?:best|min|val|valid\w*|eval\w*|test)\b")

PERSISTENT = 2
"""Reports in a row of a loss that is not finite: a single such step is often skipped, as by a
gradient scaler."""


@dataclass
class StepsInLog:
    """The number of training steps `made`, also at the end of each file."""

    made: int = 0
    by_file: dict[str, int] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)

    def count(self, text: str) -> None:
        """Take in a line; a step counts if its number exceeds the last one of the same form."""
        for form in _STEPS:
            if (found := form.search(text)) is not None:
                counter = (found["of"] or "").lower()
                step = int(found["step"])
                self.made += step > self._last.get(counter, -1)
                self._last[counter] = step
                return


@dataclass
class Losses:
    """A training loss that is not finite: since which line, and the number of reports."""

    since: LogLine | None = None
    order: int = 0
    reports: int = 0

    def learn(self, line: LogLine, order: int) -> None:
        """Take in a line; a finite loss resets this."""
        found = _LOSS.search(line.text)
        if found is None or _NOT_TRAINING.search(line.text[: found.start()][-24:]):
            return
        if found["value"].lower().lstrip("+-")[:3] in ("nan", "inf"):
            if self.since is None:
                self.since, self.order = line, order
            self.reports += 1
        else:
            self.since, self.order, self.reports = None, 0, 0

    @property
    def lost(self) -> bool:
        """Whether the last reports of the loss are not finite."""
        return self.reports >= PERSISTENT
