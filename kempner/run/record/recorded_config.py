"""What the configuration that a run keeps in its directory says."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from kempner.run.record.attempts import read_current
from kempner.run.record.run_dir import RunDirectory


def checkpoint_folder(run: RunDirectory) -> Path:
    """Where the checkpoints of a run are: `checkpoint.dir` of its live attempt, or the default.

    A relative folder is one of the directory in which the run was started, and so need not be found
    from here.
    """
    current = read_current(run.attempts)
    changed = [] if current is None else [run.changed_config(current.number)]
    for file in (*changed, run.config):
        try:
            section = tomli.loads(file.read_text(encoding="utf-8")).get("checkpoint", {})
        except FileNotFoundError:
            continue
        except ValueError:
            break  # not as kempner writes it
        return Path(section["dir"]) if "dir" in section else run.checkpoints
    return run.checkpoints


SHOWN = 8
"""Changes that are told one by one."""

_UNSET = "unset"


def changes_since(run: RunDirectory, attempt: int, now: Mapping[str, Any]) -> list[str]:
    """What differs between the configuration of an attempt and `now`, a key each.

    As in "optimizer.lr 0.004 -> 0.001". Nothing where the run has kept none that can be read.
    """
    for file in (run.changed_config(attempt), run.config):
        try:
            before = tomli.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError):
            break
        return differences(before, now)
    return []


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """What differs between two configurations, a key each, in the order of their names."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    return [
        f"{key} {_show(old.get(key))} -> {_show(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def describe_changes(changes: Sequence[str]) -> str:
    """What to add to a sentence about a resume; empty if nothing has changed."""
    if not changes:
        return ""
    more = f", and {len(changes) - SHOWN} more" if len(changes) > SHOWN else ""
    return f"; changed since: {', '.join(changes[:SHOWN])}{more}"


def _leaves(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, object]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{above}{key}.")
        else:
            yield f"{above}{key}", value


def _show(value: object) -> str:
    if value is None:
        return _UNSET
    return value if isinstance(value, str) else json.dumps(value)
