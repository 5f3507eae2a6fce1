"""What a check has found: a level and one sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

T = TypeVar("T")


class Level(StrEnum):
    """How bad it is; only FAIL keeps a run from starting, or from coming back."""

    PASS = "pass"
    SKIPPED = "skipped"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True)
class CheckOutcome:
    """What one look at one thing says: `sentence` names what, where, and what to do."""

    level: Level
    sentence: str


@dataclass(frozen=True)
class Finding:
    """An outcome of the check called `check`; `nodes` are those that it is true of, none where it
    is not about nodes."""

    check: str
    level: Level
    sentence: str
    nodes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Plain data."""
        return {
            "check": self.check,
            "level": self.level.value,
            "sentence": self.sentence,
            "nodes": list(self.nodes),
        }


def passed(sentence: str) -> CheckOutcome:
    """The outcome of a check that found no problem."""
    return CheckOutcome(Level.PASS, sentence)


def skipped(sentence: str) -> CheckOutcome:
    """The outcome of a check that could not be made, or need not be."""
    return CheckOutcome(Level.SKIPPED, sentence)


def warn(sentence: str) -> CheckOutcome:
    """A run can start, and may suffer."""
    return CheckOutcome(Level.WARN, sentence)


def fail(sentence: str) -> CheckOutcome:
    """A run cannot start, or cannot go on after an interruption."""
    return CheckOutcome(Level.FAIL, sentence)


def finding(check: str, outcome: CheckOutcome) -> Finding:
    """An outcome that is about no node."""
    return Finding(check, outcome.level, outcome.sentence)


def per_node(
    check: str, answers: Sequence[T], name: Callable[[T], str], judge: Callable[[T], CheckOutcome]
) -> list[Finding]:
    """Judge each node's answer; nodes of which the same is true share a finding.

    So do all that are well, whatever their numbers: the first of them speaks for them.
    """
    found: dict[CheckOutcome, list[str]] = {}
    well: CheckOutcome | None = None
    for answer in answers:
        outcome = judge(answer)
        if outcome.level is Level.PASS:
            outcome = well = well or outcome
        found.setdefault(outcome, []).append(name(answer))
    return [
        Finding(check, outcome.level, outcome.sentence, tuple(nodes))
        for outcome, nodes in found.items()
    ]


def worst(findings: Iterable[Finding]) -> Level:
    """The worst level of all."""
    order = list(Level)
    return max((each.level for each in findings), key=order.index, default=Level.PASS)
