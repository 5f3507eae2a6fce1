"""Whether a setting has worked before in a run: an attempt got as far as to keep it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import tomli

from kempner.run.record.attempts import attempt_numbers
from kempner.run.record.run_dir import RunDirectory

_LOOK_BACK = 20
"""Attempts whose changed configurations are looked at: the last ones."""


def used_before(run: RunDirectory, section: str, key: str, value: object) -> bool:
    """Whether an attempt that had opened all its files was configured so.

    A configuration is kept once all that it names was found. What cannot be read counts as not
    there.
    """
    return any(_lookup(path, section, key) == value for path in _configurations(run))


def _configurations(run: RunDirectory) -> Iterator[Path]:
    yield run.config
    try:
        numbers = attempt_numbers(run)
    except OSError:
        return
    for number in sorted(numbers, reverse=True)[:_LOOK_BACK]:
        yield run.changed_config(number)


def _lookup(path: Path, section: str, key: str) -> object:
    try:
        found: dict[str, Any] = tomli.loads(path.read_text(encoding="utf-8"))
        return found[section][key]
    except (OSError, ValueError, LookupError, TypeError):
        return None
