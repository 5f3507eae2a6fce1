"""Makes docs/configuration_keys.md, for people to read, from the sections in kempner/config.

python scripts/docs/configuration_page.py
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

from kempner.config.explain import KeyExplanation, Table, tables, toml_value

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration_keys.md"

HEAD = """\
<!-- Made from kempner/config by scripts/docs/configuration_page.py: change it there. -->
# Configuration keys

What each key takes, its default, an example, and its meaning. `kempner config explain KEY` prints \
the same. [configuration.md](configuration.md) says how a file and the command line set them.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, *(part for top in tables() for part in _parts(top, "##"))])


def _parts(table: Table, heading: str) -> Iterator[str]:
    rows = ["| key | takes | meaning |", "|---|---|---|", *map(_row, table.keys)]
    yield "\n".join([f"{heading} {table.name}", table.meaning, "", *rows, ""])
    for inner in table.tables:
        yield from _parts(inner, f"{heading}#")


def _row(key: KeyExplanation) -> str:
    name = key.name.rpartition(".")[2]
    takes = [_cell(key.takes), *([f"default `{_cell(key.default)}`"] if key.default else [])]
    if key.kind != "true or false" and not key.kind.startswith("one of "):
        takes.append(f"as in `{_cell(toml_value(key.example))}`")
    means = [_cell(key.meaning), *(f"`{value}`: {text}" for value, text in key.values.items())]
    return f"| `{name}` | {'<br>'.join(takes)} | {'<br>'.join(means)} |"


def _cell(text: str) -> str:
    return text.replace("|", r"\|")


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
