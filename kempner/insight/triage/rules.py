"""The rules of the table: signs in a log, their cause, and a remedy."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property


class SignLevel(IntEnum):
    """How near a sign is to the first failure. The lowest level found counts."""

    GIVEN = 0  # reported by the kernel, the driver or Slurm, often long after the ranks' errors
    CAUSE = 1  # explains a failure by itself
    MECHANISM = 2  # how a process ended, or the layer in which it failed; it has a cause
    SYMPTOM = 3  # a rank that misses another, or an exit without an explanation
    CASCADE = 4  # follows from another exit


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

    `warned`: it also counts in a warning. `within`: it counts only for an exception that came
    through a function whose name matches.
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
        found = self.regex.search(text)
        return found if found is None or re.search(self.within, through) else None


@dataclass(frozen=True)
class Cause:
    """A kind of failure: its `name` for programs, a description, and a remedy.

    `ends_from_outside`: it ends the job from outside, and explains nothing that came before.
    """

    name: str
    says: str
    do: str
    signs: tuple[Sign, ...] = ()
    ends_from_outside: bool = False


def cause(name: str, says: str, do: str, *signs: Sign, ends_from_outside: bool = False) -> Cause:
    return Cause(name, says, do, signs, ends_from_outside)
