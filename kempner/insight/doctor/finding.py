"""The findings of checks, each a level and a sentence, and their output: a coloured table on a
terminal, plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from operator import attrgetter
from typing import Any, NamedTuple, TypeVar

from rich.console import Console
from rich.table import Table
from rich.text import Text

T = TypeVar("T")


class Level(StrEnum):
    """Severity; only FAIL keeps a run from starting or resuming."""

    PASS = "pass"
    SKIPPED = "skipped"
    WARN = "warn"
    FAIL = "fail"


class CheckOutcome(NamedTuple):
    """The result of a check; `sentence` says what, where, and what to do."""

    level: Level
    sentence: str


@dataclass(frozen=True)
class Finding:
    """An outcome of the check called `check`; `nodes` are the nodes concerned, if any."""

    check: str
    level: Level
    sentence: str
    nodes: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return vars(self) | {"nodes": list(self.nodes)}


def passed(sentence: str) -> CheckOutcome:
    return CheckOutcome(Level.PASS, sentence)


def skipped(sentence: str) -> CheckOutcome:
    """The check was impossible or unnecessary."""
    return CheckOutcome(Level.SKIPPED, sentence)


def warn(sentence: str) -> CheckOutcome:
    """A run can start, but may have problems."""
    return CheckOutcome(Level.WARN, sentence)


def fail(sentence: str) -> CheckOutcome:
    """A run cannot start, or cannot resume after an interruption."""
    return CheckOutcome(Level.FAIL, sentence)


def finding(check: str, outcome: CheckOutcome, nodes: Iterable[str] = ()) -> Finding:
    return Finding(check, outcome.level, outcome.sentence, tuple(nodes))


def per_node(
    check: str,
    answers: Iterable[T],
    judge: Callable[[T], CheckOutcome],
    name: Callable[[T], str] = attrgetter("node"),
) -> list[Finding]:
    """Judge each node's answer. Nodes with the same outcome share a finding, and so do all that
    pass, with the first one's sentence."""
    found: dict[CheckOutcome, list[str]] = {}
    well: CheckOutcome | None = None
    for answer in answers:
        outcome = judge(answer)
        if outcome.level is Level.PASS:
            outcome = well = well or outcome
        found.setdefault(outcome, []).append(name(answer))
    return [finding(check, outcome, nodes) for outcome, nodes in found.items()]


def worst(findings: Iterable[Finding | CheckOutcome]) -> Level:
    return max((each.level for each in findings), key=list(Level).index, default=Level.PASS)


_STYLES = {Level.PASS: "green", Level.SKIPPED: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}

_SHOWN_NODES = 4  # nodes that are named; the others are counted


_WIDTH = 15  # characters of the longest name of a check


def where(finding: Finding, asked: Collection[str]) -> str:
    """The prefix with a finding's nodes; empty if they are all that were `asked`."""
    nodes = finding.nodes
    if not nodes or len(asked) < 2 or {*asked} == {*nodes}:
        return ""
    more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    return f"{', '.join(nodes[:_SHOWN_NODES])}{more}: "


def lines(findings: Iterable[Finding], asked: Collection[str]) -> Iterator[str]:
    """Yield a line for each finding as it comes, and a summary; `asked` are all nodes."""
    reported = []
    for each in findings:
        reported.append(each)
        yield f"{each.level.value:<7} {each.check:<{_WIDTH}}  {where(each, asked)}{each.sentence}"
    yield summary(reported)


def show(findings: Iterable[Finding], asked: Collection[str], console: Console) -> None:
    reported = []
    for each in findings:
        reported.append(each)
        style, passed = _STYLES[each.level], each.level in (Level.PASS, Level.SKIPPED)
        row = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True, width=len(Level.SKIPPED.value))
        row.add_column(no_wrap=True, width=_WIDTH)
        row.add_column(overflow="fold")
        sentence = Text(where(each, asked) + each.sentence, "dim" if passed else "")
        row.add_row(Text(each.level.value, style), Text(each.check), sentence)
        console.print(row)
    console.print(Text(summary(reported), _STYLES[worst(reported)]))


def summary(findings: Sequence[Finding]) -> str:
    counts = Counter(each.level for each in findings)
    words = ("failed", "warned", "passed", "skipped")
    order = (Level.FAIL, Level.WARN, Level.PASS, Level.SKIPPED)
    pairs = zip(order, words, strict=True)
    return ", ".join(f"{counts[level]} {word}" for level, word in pairs if counts[level])
