"""The lines of a log of any size, in bounded memory; and what they tell of how far the training had
come, and whether its loss was still a number."""

from __future__ import annotations

import gzip
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, cast

from kempner.insight.triage.log.lines import LogLine

BLOCK = 1 << 20  # bytes read at a time
LONGEST = 8192  # bytes of a line that are looked at. A longer one holds no sentence for a person.

_BREAK = re.compile(rb"\r\n|\n|\r")
_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_BOX = re.compile(r"^[\s│┃|]*[│┃]\s?|\s*[│┃]\s*$")


def read_log(path: Path) -> Iterator[str]:
    """Its lines without colours; what a progress bar overwrites counts as lines, too.

    Raises `OSError` if it cannot be read.
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
"""Forms of a step's number; the first that a line has counts."""

_LOSS = re.compile(
    r"(?i)(?<![\w/])(?:train(?:ing)?[/_. ])?(?:[lm]m[_ ]|total[_ ])?"
    r"loss(?:_step)?(?:\W{1,4}|\s+is\s+)"
    r"(?P<value>nan\b|[-+]?inf(?:inity)?\b|[-+]?\d)"
)
_NOT_TRAINING = re.compile(r"(?i)\b(?:best|min|val|valid\w*|eval\w*|test)\b")

PERSISTENT = 2
"""Reports in a row of a loss that is no number. A single one is often skipped, as by a scaler."""


@dataclass
class StepsInLog:
    """Steps that the lines tell of: how many `made`, also by the end of each file."""

    made: int = 0
    by_file: dict[str, int] = field(default_factory=dict)
    _last: dict[str, int] = field(default_factory=dict)

    def count(self, text: str) -> None:
        """Take in a line; a step is one that is later than the one told before in that form."""
        for form in _STEPS:
            if (found := form.search(text)) is not None:
                counter = (found["of"] or "").lower()
                step = int(found["step"])
                self.made += step > self._last.get(counter, -1)
                self._last[counter] = step
                return


@dataclass
class Losses:
    """The training's loss while it is no number: since which line, and how often it was told."""

    since: LogLine | None = None
    order: int = 0
    reports: int = 0

    def learn(self, line: LogLine, order: int) -> None:
        """Take in a line; a loss that is a number again ends it."""
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
        """Whether it has been none for several reports, up to the end."""
        return self.reports >= PERSISTENT
