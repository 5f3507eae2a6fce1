"""A table of names and values, as lines of text that fit the terminal."""

from __future__ import annotations

import shutil
import sys
from textwrap import wrap


def terminal_columns() -> int | None:
    """The width of the terminal; None where the output goes elsewhere."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def table_row(name: str, value: str, columns: int | None) -> list[str]:
    """A name and its value, in lines of at most `columns` characters; on a narrow screen the name
    has a line of its own. None: one line, however long.
    """
    if columns is None or len(value) + 19 <= columns:
        return [f"{name:<18} {value}"]
    if columns >= 60:
        indent = 19 * " "
        return wrap(value, columns, initial_indent=f"{name:<18} ", subsequent_indent=indent)
    if len(name) + len(value) + 2 <= columns:
        return [f"{name}: {value}"]
    return [f"{name}:", *wrap(value, columns, initial_indent="  ", subsequent_indent="  ")]
