"""Makes docs/events.md, for people to read, from the records in kempner/run/record/events.

python scripts/docs/event_page.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import get_type_hints

from kempner.run.record.events import SUBJECTS, LedgerEvent

PAGE = Path(__file__).resolve().parents[2] / "docs" / "events.md"

HEAD = """\
<!-- Made from kempner/run/record/events by scripts/docs/event_page.py: change it there. -->
# Events

What `ledger.jsonl` of a run tells: one JSON object a line, each with `schema`, `time` (seconds \
since the epoch), `event` (its name), `attempt` (a number) and the fields below. Fields in \
brackets are left out where there is nothing to say. A reader passes over lines and fields that it \
does not know.
"""


def main() -> int:
    PAGE.write_text(page(SUBJECTS))
    return 0


def page(subjects: Mapping[str, Sequence[type[LedgerEvent]]]) -> str:
    """The page for these events, which stay in their order."""
    lines = [HEAD]
    for title, kinds in subjects.items():
        lines += [f"## {title}", "| event | written by | when | fields |", "|---|---|---|---|"]
        lines += [row(kind) for kind in kinds]
        lines.append("")
    return "\n".join(lines)


def row(kind: type[LedgerEvent]) -> str:
    """One event, from its docstring and its fields."""
    by, when = origin(kind)
    hints = get_type_hints(kind, include_extras=True)
    told = [describe(field, hints[field.name]) for field in fields(kind)]
    return f"| `{kind.name}` | {by} | {when} | {'<br>'.join(told).replace('|', chr(92) + '|')} |"


def origin(kind: type[LedgerEvent]) -> tuple[str, str]:
    """By whom, and when, with what its docstring says besides."""
    words = " ".join(inspect.cleandoc(kind.__doc__ or "").split())
    by, _, when = words.removeprefix("By ").partition(": ")
    return by, when.removeprefix("when ").removesuffix(".")


def describe(field: Field[object], hint: object) -> str:
    """A field, and what it holds where its name does not say so."""
    (words,) = getattr(hint, "__metadata__", ("",))
    told = f"`{field.name}`" if words == field.name else f"`{field.name}`: {words}"
    return told if field.default is MISSING else f"[{told}]"


if __name__ == "__main__":
    sys.exit(main())
