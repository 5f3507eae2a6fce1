"""Findings as a table: in colours at a terminal, in plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kempner.insight.doctor.finding import Finding, Level, worst

_STYLES = {Level.PASS: "green", Level.SKIPPED: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}

_SHOWN_NODES = 4
"""Nodes that are named; of more, how many."""


_WIDTH = 15
"""Characters of the longest name of a check."""


def where(finding: Finding, asked: Collection[str]) -> str:
    """The nodes that a finding is about, before its sentence; empty if all that were `asked`."""
    nodes = finding.nodes
    if not nodes or len(asked) < 2 or {*asked} == {*nodes}:
        return ""
    more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    return f"{', '.join(nodes[:_SHOWN_NODES])}{more}: "


def lines(findings: Iterable[Finding], asked: Collection[str]) -> Iterator[str]:
    """One line for each finding, as it comes, and one for all; `asked` are all nodes."""
    told = []
    for each in findings:
        told.append(each)
        yield f"{each.level.value:<7} {each.check:<{_WIDTH}}  {where(each, asked)}{each.sentence}"
    yield summary(told)


def show(findings: Iterable[Finding], asked: Collection[str], console: Console) -> None:
    """The same at a terminal."""
    told = []
    for each in findings:
        told.append(each)
        style, passed = _STYLES[each.level], each.level in (Level.PASS, Level.SKIPPED)
        row = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
        row.add_column(no_wrap=True, width=len(Level.SKIPPED.value))
        row.add_column(no_wrap=True, width=_WIDTH)
        row.add_column(overflow="fold")
        sentence = Text(where(each, asked) + each.sentence, "dim" if passed else "")
        row.add_row(Text(each.level.value, style), Text(each.check), sentence)
        console.print(row)
    console.print(Text(summary(told), _STYLES[worst(told)]))


def summary(findings: Sequence[Finding]) -> str:
    """How many of each level, worst first."""
    counts = Counter(each.level for each in findings)
    words = {
        Level.FAIL: "failed",
        Level.WARN: "warned",
        Level.PASS: "passed",
        Level.SKIPPED: "skipped",
    }
    return ", ".join(f"{counts[level]} {word}" for level, word in words.items() if counts[level])
