"""Makes docs/storage_faults.md, the table of storage faults, from the record of the drills.

python scripts/docs/storage_fault_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
import records  # noqa: E402

SOURCE, PAGE = ROOT / "docs" / "drills.jsonl", ROOT / "docs" / "storage_faults.md"

Cell = Mapping[str, Any]

WHENS = ("start", "load", "step", "save", "stop", "requeue")

HEAD = """\
<!-- Made from drills.jsonl by scripts/docs/storage_fault_page.py, after `make long`. -->
# Storage that misbehaves

A run on a file system of the tests' own, which fails where and when a test says so: \
`tests/faulty_storage`. Each cell below is one fault of one run, and what must hold is always the \
same: exit code 0 (after a stop: 75, and 0 when it is started again), the weights of an \
undisturbed run to the last bit, every sample taken once, no checkpoint set aside, no `GAVE_UP`; \
and the file system's own log shows that the fault happened in its moment.

| | |
|---|---|
| **what** | the error that operations end with; `hang`: they wait until the fault is over; \
`empty`: folders list nothing, and files are absent |
| **when it begins** | `start`: with the launch. `load`: when a resume opens a manifest. `step`: \
after the third step. `save`: with a save's first folder. `stop`: with a SIGTERM. `requeue`: with \
the launch after a stop |
| **how long** | `10 s`, `90 s`: from the first operation that meets it, which is cut: it is \
carried out (a read or a write by half), and only the answer is lost. `p`: for 10 s, each \
operation with probability 0.3 |

"""

NONE = "The record of the drills has no such runs.\n"


def main() -> int:
    PAGE.write_text(page(read()))
    return 0


def read() -> list[Cell]:
    return [row for row in records.read(SOURCE) if row["drill"] == "storage fault"]


def page(cells: Sequence[Cell]) -> str:
    """The page for these lines of the record."""
    if not cells:
        return HEAD + NONE
    parts = [HEAD, summary(cells)]
    for where in in_order(cell["where"] for cell in cells):
        parts.append(table(where, [cell for cell in cells if cell["where"] == where]))
    if wrong := [cell for cell in cells if cell["wrong"]]:
        parts.append("## What did not hold\n")
        parts += [f"- {name(cell)}: {'; '.join(cell['wrong'])}\n" for cell in wrong]
    return "\n".join(parts)


def summary(cells: Sequence[Cell]) -> str:
    """How many cells there are, and how many held."""
    good, faults = sum(not cell["wrong"] for cell in cells), sum(cell["faults"] for cell in cells)
    return (
        f"Of {len(cells)} cells {good} held; {faults:,} operations met a fault. An entry gives how "
        "long the fault lasted, and the seconds from the launch to the end. Of "
        f"{records.origin(cells)}, on {', '.join(in_order(cell['machine'] for cell in cells))}; "
        "each with its command in [the record](drills.jsonl).\n"
    )


def table(where: str, cells: Sequence[Cell]) -> str:
    """The faults of one place: what by when."""
    whens = [when for when in WHENS if any(cell["when"] == when for cell in cells)]
    lines = [f"## {where}", f"| | {' | '.join(whens)} |", f"|---|{'---|' * len(whens)}"]
    for what in in_order(cell["what"] for cell in cells):
        entries = (entry(c for c in cells if (c["what"], c["when"]) == (what, w)) for w in whens)
        lines.append(f"| {what} | {' | '.join(entries)} |")
    return "\n".join(lines) + "\n"


def entry(cells: Iterable[Cell]) -> str:
    """How long each lasted, and what it took."""
    return "<br>".join(
        f"{cell['how']}: {'**failed**' if cell['wrong'] else format(cell['seconds'], '.0f') + ' s'}"
        for cell in cells
    )


def name(cell: Cell) -> str:
    return ", ".join(cell[part] for part in ("what", "where", "when", "how"))


def in_order(names: Iterable[str]) -> list[str]:
    """Each once, as they come."""
    return list(dict.fromkeys(names))


if __name__ == "__main__":
    sys.exit(main())
