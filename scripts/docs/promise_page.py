"""Makes docs/promises.md, for people to read, from docs/promises.toml.

python scripts/docs/promise_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tomli

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE, PAGE = DOCS / "promises.toml", DOCS / "promises.md"

TITLES = {
    "A": "Submitting a job",
    "B": "Ranks and resources",
    "C": "Network",
    "D": "Stops and returns",
    "E": "Watching a run, and finding out what went wrong",
    "F": "Allocations, containers, nodes",
    "G": "Training",
    "H": "Configurations",
    "I": "What goes beyond",
    "J": "What fails for a moment",
}

HEAD = """\
<!-- Made from promises.toml by scripts/docs/promise_page.py: change it there. -->
# Promises

What kempner promises to its users, and the tests that hold it to that: {summary}. The test \
suite fails if one of these tests is not there, or was skipped where everything must run.
"""


def main() -> int:
    PAGE.write_text(page(tomli.loads(SOURCE.read_text())["promise"]))
    return 0


def page(promises: Sequence[Mapping[str, Any]]) -> str:
    """The page for these entries of promises.toml, which stay in their order."""
    lines = [HEAD.format(summary=summary(promises))]
    for letter, entries in groupby(promises, lambda entry: entry["id"][0]):
        lines += [f"## {TITLES[letter]}", "| | promise | held by |", "|---|---|---|"]
        lines += [f"| {e['id']} | {cell(e['promise'])} | {held_by(e)} |" for e in entries]
        lines.append("")
    return "\n".join(lines)


def summary(promises: Sequence[Mapping[str, Any]]) -> str:
    """How many there are of each kind, in words."""
    whole = sum("tests" in e and "open" not in e for e in promises)
    partly = sum("tests" in e and "open" in e for e in promises)
    missing = sum("tests" not in e and "open" in e for e in promises)
    refused = sum("out_of_scope" in e for e in promises)
    told = f"of {len(promises)}, {whole} are held by tests, {partly} in part, {missing} are open"
    return f"{told}, {refused} are out of scope" if refused else told


def held_by(entry: Mapping[str, Any]) -> str:
    """Its tests, each a link to its file, and what is missing."""
    parts = [link(test) for test in entry.get("tests", ())]
    if entry.get("drill"):
        parts.append("(only `make long` runs it)")
    if "open" in entry:
        parts.append(f"**Open:** {cell(entry['open'])}")
    if "out_of_scope" in entry:
        parts.append(f"**Out of scope:** {cell(entry['out_of_scope'])}")
    return "<br>".join(parts)


def link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name}`](../{path})"


def cell(text: str) -> str:
    """Text that does not end the cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
