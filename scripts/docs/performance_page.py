"""Makes the tables of the pages with figures, and all of docs/measurements.md, from the records.

    python scripts/docs/performance_page.py

In these pages, what stands between `<!-- table: WHAT; COLUMN; COLUMN -->` and `<!-- end -->` is the
rows of a benchmark, drill or record, with these columns, and the commands, commits and days that
they are of. `WHAT where KEY=VALUE` takes some of the rows, `WHAT + WHAT` those of both.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "tests"))
import records  # noqa: E402

DOCS = ROOT / "docs"
SOURCES = tuple(DOCS / f"{name}.jsonl" for name in ("performance", "drills", "versions"))
PAGES = tuple(DOCS / f"{n}.md" for n in ("performance", "goodput", "sites", "trainer", "wrap"))
DETAILS = DOCS / "measurements.md"
KINDS = ("benchmark", "drill", "record")
HIDDEN = {"benchmark", *records.HEADER}
TABLE = re.compile(
    r"(<!-- table: (?P<what>[^;>]+); (?P<columns>[^>]+) -->\n).*?(<!-- end -->)", re.S
)

HEAD = """\
<!-- Made from performance.jsonl by scripts/docs/performance_page.py. -->
# Measurements

All that the benchmarks have recorded; [performance](performance.md) says what it means, and each \
program what its columns are. `python benchmarks/measure.py` measures what is older than the code.
"""

Row = Mapping[str, Any]


def main() -> int:
    rows = read()
    for file in PAGES:
        file.write_text(page(file.read_text(), rows))
    DETAILS.write_text(details(rows))
    return 0


def read() -> list[dict[str, Any]]:
    return [row for source in SOURCES if source.exists() for row in records.read(source)]


def page(text: str, rows: Sequence[Row]) -> str:
    """The page with its tables made anew."""

    def made(found: re.Match[str]) -> str:
        ours = chosen(rows, found["what"])
        columns = found["columns"].split("; ")
        shown = [{key.replace("_", " "): row.get(key) for key in columns} for row in ours]
        lines = records.table(shown)
        return "\n".join([found[1].rstrip(), *lines, "", f"{measured(ours)} {found[4]}"])

    return TABLE.sub(made, text)


def chosen(rows: Sequence[Row], what: str) -> list[Row]:
    """The rows of a benchmark, drill or record; those of one case where the page asks for it."""
    name, _, case = what.partition(" where ")
    key, _, value = case.partition("=")
    names = name.split(" + ")
    ours = [row for row in rows if {row.get(kind) for kind in KINDS} & {*names}]
    found = [row for row in ours if not case or str(row.get(key)) == value]
    if not found:
        raise SystemExit(f"the records have no row of {what!r}, which a page shows")
    return found


def measured(rows: Sequence[Row]) -> str:
    """When rows were measured, and where the rest of them is."""
    if name := rows[0].get("benchmark"):
        place = f"measurements.md#{re.sub('[^a-z ]', '', name.lower()).replace(' ', '-')}"
    else:
        place = "drills.jsonl" if "drill" in rows[0] else "versions.jsonl"
    return f"Of {records.origin(rows)} ([all]({place}))."


def details(rows: Sequence[Row]) -> str:
    """Every row of the benchmarks, with all that it has."""
    ours = [row for row in rows if "benchmark" in row]
    lines = [HEAD]
    for name in dict.fromkeys(row["benchmark"] for row in ours):
        lines += [f"## {name[0].upper()}{name[1:]}", ""]
        same = [row for row in ours if row["benchmark"] == name]
        for told in dict.fromkeys(map(source, same)):
            found = [row for row in same if source(row) == told]
            shown = [{key: row[key] for key in row if key not in HIDDEN} for row in found]
            lines += [told, "", *records.table(shown), ""]
    return "\n".join(lines)


def source(row: Row) -> str:
    """The header of a row, as a sentence."""
    when = f"{row['date'][:10]}, commit {row['commit']}"
    return f"`{row['command']}`: {when}; {row['machine']}; versions: {row['versions']}."


if __name__ == "__main__":
    sys.exit(main())
