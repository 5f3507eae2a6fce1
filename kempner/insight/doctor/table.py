"""Findings as a table: in colours at a terminal, in plain lines elsewhere."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from kempner.insight.doctor.finding import Finding, Level, worst

_STYLES = {Level.PASS: "green", Level.SKIPPED: "dim", Level.WARN: "yellow", Level.FAIL: "bold red"}

_SHOWN_NODES = 4
"""Nodes that are named; of more, how many."""


def where(finding: Finding, everybody: frozenset[str]) -> str:
    """The nodes that a finding is about, before its sentence; empty if that is `everybody`."""
    nodes = finding.nodes
    if not nodes or everybody == {*nodes}:
        return ""
    more = f" and {len(nodes) - _SHOWN_NODES} more" if len(nodes) > _SHOWN_NODES else ""
    return f"{', '.join(nodes[:_SHOWN_NODES])}{more}: "


def lines(findings: Sequence[Finding]) -> list[str]:
    """One line for each finding, and one for all."""
    everybody = _everybody(findings)
    width = max((len(each.check) for each in findings), default=0)
    rows = [
        f"{each.level.value:<7} {each.check:<{width}}  {where(each, everybody)}{each.sentence}"
        for each in findings
    ]
    return [*rows, summary(findings)]


def show(findings: Sequence[Finding], console: Console) -> None:
    """At a terminal."""
    everybody = _everybody(findings)
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for each in findings:
        style = _STYLES[each.level]
        sentence = where(each, everybody) + each.sentence
        passed = each.level in (Level.PASS, Level.SKIPPED)
        table.add_row(
            Text(each.level.value, style), Text(each.check), Text(sentence, "dim" if passed else "")
        )
    console.print(table)
    console.print(Text(summary(findings), _STYLES[worst(findings)]))


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


def _everybody(findings: Sequence[Finding]) -> frozenset[str]:
    """All nodes that anything is said of."""
    return frozenset(node for each in findings for node in each.nodes)
