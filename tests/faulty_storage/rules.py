"""What fails, where, when, and for how long: rules, and what they say of each operation.

Without FUSE and without a clock of its own, so that tests can look at it alone.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from random import Random
from typing import Any

READS = ("open", "read", "readdir", "stat", "readlink")
WRITES = ("create", "write", "fsync", "flush", "mkdir", "rename", "unlink", "symlink", "truncate")
OPERATIONS = (*READS, *WRITES, "statfs")
"""Every kind of operation. `open` is of a file that is there, `create` of one that was not; `fsync`
is of files and folders, `unlink` of both, too."""

HANG, EMPTY = "hang", "empty"
"""Faults besides the names of errnos: an operation waits until the fault is over; what fits a
pattern is absent, but for a folder that is named as such (`tokens/`), which lists nothing."""

DELAY, MARK = "delay", "mark"
"""What is no fault: an operation takes `each` seconds longer; an operation is written down."""


@dataclass(frozen=True)
class Match:
    """Operations of these kinds on paths, relative to the mount, that fit one of these patterns.

    A pattern with a slash at its end names a folder; the mount's own is `/`.
    """

    paths: tuple[str, ...]
    operations: tuple[str, ...] = OPERATIONS

    def fits(self, operation: str, path: str) -> bool:
        patterns = (pattern.rstrip("/") for pattern in self.paths)
        return operation in self.operations and any(fnmatchcase(path, p) for p in patterns)

    def has_folder(self, path: str) -> bool:
        """Whether this is a folder that is named as such."""
        return f"{path}/" in self.paths


@dataclass(frozen=True)
class Rule:
    """A fault of the operations that `match`.

    It begins with the first of them, once `after` has been seen `count` times (at once, if there is
    no `after`), and is over `seconds` later (None: when it is cleared). The first operation meets
    it, and each of the others with this probability. `cut` lets the first one be carried out, a
    read or a write by half, and only the answer be lost. `each` is how many seconds an operation
    hangs where that is not until the end. `now` lets the fault begin with the first operation of
    any kind, be it met or not.
    """

    name: str
    fault: str
    match: Match
    seconds: float | None = None
    probability: float = 1.0
    seed: int = 0
    cut: bool = False
    each: float | None = None
    after: Match | None = None
    count: int = 1
    now: bool = False

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Rule:
        fields: dict[str, Any] = json.loads(text)
        for name in ("match", "after"):
            if fields[name] is not None:
                fields[name] = Match(*map(tuple, fields[name].values()))
        return cls(**fields)


@dataclass(frozen=True)
class Strike:
    """What happens to one operation. `until` is on the clock of who asked; None is no end."""

    rule: str
    fault: str
    cut: bool = False
    until: float | None = None


@dataclass
class Life:
    """A rule, and how far it is."""

    rule: Rule
    to_see: int = 0
    began: float | None = None
    met: bool = False
    random: Random = field(default_factory=Random)

    def __post_init__(self) -> None:
        self.to_see = self.rule.count if self.rule.after is not None else 0
        self.random.seed(self.rule.seed)

    def over(self, now: float) -> bool:
        end = self._end()
        return end is not None and now >= end

    def meet(self, operation: str, path: str, now: float) -> Strike | None:
        """What the rule does to this operation."""
        rule = self.rule
        if self.to_see:
            if rule.after is not None and rule.after.fits(operation, path):
                self.to_see -= 1
            return None
        fits = rule.match.fits(operation, path)
        if rule.fault == EMPTY and operation != "readdir" and rule.match.has_folder(path):
            fits = False
        if self.began is None and (fits or rule.now):
            self.began = now
        if not fits or self.over(now):
            return None
        first, self.met = not self.met, True
        if not first and self.random.random() >= rule.probability:
            return None
        until = now + rule.each if rule.each is not None else self._end()
        return Strike(rule.name, rule.fault, rule.cut and first, until)

    def _end(self) -> float | None:
        if self.began is None or self.rule.seconds is None:
            return None
        return self.began + self.rule.seconds


def strikes(lives: Iterable[Life], operation: str, path: str, now: float) -> list[Strike]:
    """What happens to this operation; every rule sees it."""
    met = (life.meet(operation, path, now) for life in lives)
    return [strike for strike in met if strike is not None]
