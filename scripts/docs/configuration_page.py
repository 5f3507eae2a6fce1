"""Makes docs/configuration_keys.md, for people to read, from the sections in kempner/config.

python scripts/docs/configuration_page.py
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import tomli_w
from pydantic.fields import FieldInfo

from kempner.config.section import Section
from kempner.config.sections import Config

PAGE = Path(__file__).resolve().parents[2] / "docs" / "configuration_keys.md"

HEAD = """\
<!-- Made from kempner/config by scripts/docs/configuration_page.py: change it there. -->
# Configuration keys

Every section and key, its default and its meaning. [configuration.md](configuration.md) says how \
a file and the command line set them; `kempner config schema` prints the same for programs.
"""


def page() -> str:
    """The whole page, in Markdown."""
    return "\n".join([HEAD, *(_section(*named) for named in Config.model_fields.items())])


def _section(name: str, field: FieldInfo) -> str:
    (kind,) = _sections_in(field.annotation)
    table = ["| key | default | meaning |", "|---|---|---|", *_rows("", kind)]
    return "\n".join([f"## {name}", inspect.cleandoc(kind.__doc__ or ""), "", *table, ""])


def _rows(prefix: str, kind: type[Section]) -> Iterator[str]:
    for key, field in kind.model_fields.items():
        inner = _sections_in(field.annotation)
        default = "" if inner else _default(field)
        yield f"| `{prefix}{key}` | {default} | {_one_line(field.description or '')} |"
        for nested in inner:
            yield from _rows(f"{prefix}{key}.", nested)


def _sections_in(annotation: Any) -> list[type[Section]]:
    """The sections that a field may hold: itself, or in an optional one."""
    kinds = (annotation, *get_args(annotation))
    return [kind for kind in kinds if inspect.isclass(kind) and issubclass(kind, Section)]


def _default(field: FieldInfo) -> str:
    """As TOML; nothing where there is none."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is None or value == {}:
        return ""
    return f"`{_one_line(tomli_w.dumps({'x': value}).removeprefix('x = '))}`"


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|")


def main() -> int:
    PAGE.write_text(page())
    return 0


if __name__ == "__main__":
    sys.exit(main())
