"""Makes the table of docs/sites.md on Slurm's versions from the record of what ran on them.

python scripts/docs/slurm_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[2] / "tests"))
import records

DOCS = Path(__file__).resolve().parents[2] / "docs"
SOURCE, PAGE = DOCS / "slurm_versions.jsonl", DOCS / "sites.md"
BEGIN, END = "<!-- Made by scripts/docs/slurm_page.py. -->\n", "<!-- The end of it. -->\n"

Run = Mapping[str, Any]


def main() -> int:
    PAGE.write_text(page(PAGE.read_text(), read()))
    return 0


def read() -> list[Run]:
    return list(records.read(SOURCE))


def page(text: str, runs: Sequence[Run]) -> str:
    """The page with its table made anew."""
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    return before + BEGIN + table(runs) + END + after


def table(runs: Sequence[Run]) -> str:
    """Each test by version."""
    outcomes = {(function(run), run["slurm"], run["test"]): run["outcome"] for run in runs}
    versions = sorted({run["slurm"] for run in runs})
    lines = [f"| test | {' | '.join(versions)} |", f"|---|{'---|' * len(versions)}"]
    for test in sorted({function(run) for run in runs}):
        cells = [
            cell([out for (name, slurm, _), out in outcomes.items() if (name, slurm) == (test, v)])
            for v in versions
        ]
        path, _, name = test.partition("::")
        words = name.removeprefix("test_").replace("_", " ")
        lines.append(f"| [{words}](../{path}) | {' | '.join(cells)} |")
    said = (
        f"Of {records.origin(runs)}; each with its command in [the record](slurm_versions.jsonl)."
    )
    return "\n".join([*lines, "", said]) + "\n"


def function(run: Run) -> str:
    """The test without its parameters."""
    return str(run["test"].partition("[")[0])


def cell(outcomes: Sequence[str]) -> str:
    """Of the cases of a test, how many passed; empty where it did not run."""
    if not outcomes:
        return ""
    passed = outcomes.count("passed")
    if passed == len(outcomes):
        return "passed" if passed == 1 else f"all {passed} passed"
    return f"**{passed} of {len(outcomes)} passed**"


if __name__ == "__main__":
    sys.exit(main())
