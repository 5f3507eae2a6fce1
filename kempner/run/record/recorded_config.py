"""What the configuration that a run keeps in its directory says."""

from __future__ import annotations

import errno
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from kempner.run.process.exit_codes import DataError
from kempner.run.record.attempts import Attempt, read_current
from kempner.run.record.run_dir import RunDirectory


def recorded_config(run: RunDirectory, attempt: int | None) -> Mapping[str, Any]:
    """The tables of an attempt's configuration; of the run's first one if that is not kept apart.

    Empty if there is none, or not as kempner writes it.
    """
    changed = [] if attempt is None else [run.changed_config(attempt)]
    for file in (*changed, run.config):
        try:
            return tomli.loads(file.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            continue
        except ValueError:
            break
    return {}


def checkpoint_folder(run: RunDirectory) -> Path:
    """Where the checkpoints of a run are: `checkpoint.dir` of its live attempt, or the default.

    A relative folder is one of the directory in which the run was started, and so need not be found
    from here.
    """
    found = _recorded(run, "checkpoint", "dir")
    return Path(found) if isinstance(found, str) else run.checkpoints


def total_steps(run: RunDirectory) -> int | None:
    """`train.max_steps` of the live attempt; None if no configuration was kept."""
    found = _recorded(run, "train", "max_steps")
    return found if isinstance(found, int) else None


def live_attempt(run: RunDirectory) -> Attempt | None:
    """What `attempts/CURRENT` names; None where it is not there, or is damaged.

    Raises `OSError` if it cannot be read now.
    """
    try:
        return read_current(run.attempts)
    except DataError:
        return None
    except OSError as error:
        if error.errno not in _NO_FILE:
            raise
        return None


_NO_FILE = (errno.ENODATA, errno.ENOTDIR, errno.EISDIR)
"""Error numbers of what is empty, or no file at all."""


def _recorded(run: RunDirectory, section: str, key: str) -> object:
    """What the live attempt was configured with; None if that says nothing."""
    current = live_attempt(run)
    found = recorded_config(run, None if current is None else current.number).get(section)
    return found.get(key) if isinstance(found, dict) else None
