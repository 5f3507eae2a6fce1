"""What a rule of the table is: signs in a log, what they mean, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class SignLevel(IntEnum):
    """How near a sign is to the beginning. The least that was found counts."""

    GIVEN = 0
    """The machine, its kernel or Slurm says so, often long after those who suffer from it."""
    CAUSE = 1
    """Explains a failure by itself."""
    MECHANISM = 2
    """How a process ended, or the layer in which it failed; something made it do so."""
    SYMPTOM = 3
    """A rank that misses another, or an end without an explanation."""
    CASCADE = 4
    """Follows from another end, and is no cause."""


class Sure(IntEnum):
    """How far the words of a sign can be trusted."""

    UNKNOWN = 0
    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3

    @property
    def label(self) -> str:
        """As a person and the JSON read it."""
        return self.name.lower()


class Blame(IntEnum):
    """Who a sign is about."""

    WRITER = 0
    """The rank that wrote the line, unless the sign names another."""
    NAMED = 1
    """Only what the sign names, by a group `rank`, `ranks`, `node`, `pid` or `address`."""


@dataclass(frozen=True)
class Sign:
    """A regular expression for the text of a line, or for `Type: message` of an exception.

    With `warned` it counts also where it is only a warning.
    """

    pattern: str
    level: SignLevel = SignLevel.CAUSE
    sure: Sure = Sure.CERTAIN
    blame: Blame = Blame.WRITER
    warned: bool = False

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)


@dataclass(frozen=True)
class Cause:
    """A kind of failure: a `name` for programs, what to say of it, what to do about it.

    `ends_from_outside`: it ends what still runs, and so explains nothing that came before.
    """

    name: str
    says: str
    do: str
    signs: tuple[Sign, ...] = ()
    ends_from_outside: bool = False
