"""The configurations that a run keeps in its directory, and how they differ."""

from __future__ import annotations

import errno
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import tomli

from kempner.run.process.exit_codes import DataError
from kempner.run.record.attempts import Attempt, attempt_numbers, read_current
from kempner.run.record.run_dir import RunDirectory


def recorded_config(run: RunDirectory, attempt: int | None) -> Mapping[str, Any]:
    """The tables of an attempt's configuration, or of the run's first; empty if there is none, or
    it cannot be parsed."""
    changed = [] if attempt is None else [run.changed_config(attempt)]
    for file in (*changed, run.config):
        try:
            return tomli.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except ValueError:
            break
    return {}


def last_config(run: RunDirectory) -> Path | None:
    """The file of the last configuration that worked: the one that a supervisor has checked, or
    that of the live attempt. Raises `OSError`."""
    current = live_attempt(run)
    of_attempt = [] if current is None else [run.changed_config(current.number)]
    return next((file for file in (run.accepted, *of_attempt, run.config) if file.is_file()), None)


def checkpoint_folder(run: RunDirectory) -> Path:
    """`checkpoint.dir` of the live attempt, or the default. A relative folder is relative to the
    directory in which the run was started, and so may not exist from here."""
    found = _recorded(run, "checkpoint", "dir")
    return Path(found) if isinstance(found, str) else run.checkpoints


def total_steps(run: RunDirectory) -> int | None:
    """`train.max_steps` of the live attempt; None if no configuration was kept."""
    found = _recorded(run, "train", "max_steps")
    return found if isinstance(found, int) else None


def live_attempt(run: RunDirectory) -> Attempt | None:
    """The attempt in `attempts/CURRENT`; None if the file is missing or damaged. Raises `OSError`
    if it cannot be read now."""
    try:
        return read_current(run.attempts)
    except DataError:
        return None
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None


_NO_FILE = (errno.ENODATA, errno.ENOTDIR, errno.EISDIR)
"""Error numbers of an empty file, or of a path that is not a file."""


def _recorded(run: RunDirectory, section: str, key: str) -> object:
    """A value of the live attempt's configuration; None if it is not set there."""
    current = live_attempt(run)
    found = recorded_config(run, None if current is None else current.number).get(section)
    return found.get(key) if isinstance(found, dict) else None


SHOWN = 8
"""Most changes that are listed."""

_UNSET = "unset"


def changes_since(run: RunDirectory, attempt: int, now: Mapping[str, Any]) -> list[str]:
    """The differences between the configuration of an attempt and `now`, by key, as in
    "optimizer.lr 0.004 -> 0.001"; empty if it cannot be read."""
    try:
        before = recorded_config(run, attempt)
    except OSError:
        return []
    return differences(before, now) if before else []


def differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """The differences between two configurations, by key, sorted."""
    old, new = dict(_leaves(before)), dict(_leaves(now))
    return [
        f"{key} {_show(old.get(key))} -> {_show(new.get(key))}"
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def describe_changes(changes: Sequence[str]) -> str:
    """The text to append to a sentence about a resume; empty without changes."""
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


_LOOK_BACK = 20
"""How many of the last attempts' configurations are examined."""


def used_before(run: RunDirectory, key: str, value: object) -> bool:
    """Whether a recorded configuration had this value; files that cannot be read do not count."""
    return any(_lookup(path, key) == value for path in _configurations(run))


def _configurations(run: RunDirectory) -> Iterator[Path]:
    yield run.config
    try:
        numbers = attempt_numbers(run)
    except OSError:
        return
    for number in sorted(numbers, reverse=True)[:_LOOK_BACK]:
        yield run.changed_config(number)


def _lookup(path: Path, key: str) -> object:
    try:
        found: Any = tomli.loads(path.read_text(encoding="utf-8"))
        for name in key.split("."):
            found = found[name]
        return found
    except (OSError, ValueError, LookupError, TypeError):
        return None
