"""What a rule of the table is: signs in a log, what they mean, and what to do."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class SignLevel(IntEnum):
    """How near a sign is to the beginning. The least that was found counts."""

    GIVEN = 0  # the machine, its kernel or Slurm says so, often long after those who suffer from it
    CAUSE = 1  # explains a failure by itself
    MECHANISM = 2  # how a process ended, or the layer in which it failed; something made it do so
    SYMPTOM = 3  # A rank that misses another, or an end without an explanation
    CASCADE = 4  # follows from another end, and is no cause


class Sure(IntEnum):
    UNKNOWN = 0
    POSSIBLE = 1
    LIKELY = 2
    CERTAIN = 3

    @property
    def label(self) -> str:
        return self.name.lower()


class Blame(IntEnum):
    WRITER = 0  # the rank that wrote the line, unless the sign names another
    NAMED = 1  # only what the sign names, by a group `rank`, `ranks`, `node`, `pid` or `address`


@dataclass(frozen=True)
class Sign:
    """A regular expression for the text of a line, or for `Type: message` of an exception.

    With `warned` it counts also where it is only a warning, with `within` only of an exception
    that a function of such a name is in the way of.
    """

    pattern: str
    level: SignLevel = SignLevel.CAUSE
    sure: Sure = Sure.CERTAIN
    blame: Blame = Blame.WRITER
    warned: bool = False
    within: str = ""

    @cached_property
    def regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern)

    def search(self, text: str, through: str = "") -> re.Match[str] | None:
        """In a text, or in an exception raised `through` these functions."""
        found = self.regex.search(text)
        return found if found is None or re.search(self.within, through) else None


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


def cause(name: str, says: str, do: str, *signs: Sign, ends_from_outside: bool = False) -> Cause:
    return Cause(name, says, do, signs, ends_from_outside)
