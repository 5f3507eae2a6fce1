"""How far the training had come, and whether its loss was still a number, as the lines tell."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from kempner.insight.triage.log.lines import LogLine

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
class Steps:
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
