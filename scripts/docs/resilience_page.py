"""Makes docs/resilience.md, for people to read, from docs/faults.toml.

python scripts/docs/resilience_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import tomli
from promise_page import cell

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE, PAGE = DOCS / "faults.toml", DOCS / "resilience.md"

HEAD = """\
<!-- Made from faults.toml by scripts/docs/resilience_page.py: change it there. -->
# Resilience

What can happen to a run, what kempner does about it, and what it costs. Each row names tests that \
make it happen: real signals, real processes, a real Slurm, real errors of a file system. `make \
check` runs them before every change, and `make long` the longest; their record is \
[drills.jsonl](drills.jsonl).

Two rules are behind all of it. A stop that leaves time for a checkpoint loses no step. A crash \
loses at most the steps since the last commit. In both, no sample is repeated or missed, and the \
weights are bit for bit those of a run that nothing happened to, on the CPU with as many ranks and \
threads.
"""


def main() -> int:
    PAGE.write_text(page(tomli.loads(SOURCE.read_text())["fault"]))
    return 0


def page(faults: Sequence[Mapping[str, Any]]) -> str:
    """The page for these entries of faults.toml, which stay in their order."""
    lines = [HEAD]
    for part, entries in groupby(faults, lambda entry: entry["part"]):
        lines += [f"## {part}", "| what happens | what kempner does | what it costs | proved by |"]
        lines += ["|---|---|---|---|", *(row(entry) for entry in entries), ""]
    lines.append(
        "More: [stopping](stopping.md), [restarts, hangs and giving up](restarts_and_hangs.md), "
        "[nodes](nodes.md), [storage](storage.md), [divergence](divergence.md).\n"
    )
    return "\n".join(lines)


def row(entry: Mapping[str, Any]) -> str:
    """A fault, and its tests: their names are sentences."""
    tests = "<br>".join(link(test) for test in entry["tests"])
    if entry.get("drill"):
        tests += " (in `make long`)"
    told = " | ".join(cell(entry[key]) for key in ("fault", "answer", "costs"))
    return f"| {told} | {tests} |"


def link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[{name.removeprefix('test_').replace('_', ' ')}](../{path})"


if __name__ == "__main__":
    sys.exit(main())
