"""What the configuration that a run keeps in its directory says."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli

from kempner.run.record.attempts import read_current
from kempner.run.record.run_dir import RunDirectory


def recorded_config(run: RunDirectory, attempt: int | None) -> Mapping[str, Any]:
    """The tables of an attempt's configuration; of the run's first one if that is not kept apart.

    Empty if there is none, or not as kempner writes it.
    """
    changed = [] if attempt is None else [run.changed_config(attempt)]
    for file in (*changed, run.config):
        try:
            return tomli.loads(file.read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except ValueError:
            break
    return {}


def checkpoint_folder(run: RunDirectory) -> Path:
    """Where the checkpoints of a run are: `checkpoint.dir` of its live attempt, or the default.

    A relative folder is one of the directory in which the run was started, and so need not be found
    from here.
    """
    current = read_current(run.attempts)
    config = recorded_config(run, None if current is None else current.number)
    section = config.get("checkpoint", {})
    return Path(section["dir"]) if "dir" in section else run.checkpoints
