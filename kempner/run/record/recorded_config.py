"""What the configuration that a run keeps in its directory says."""

from __future__ import annotations

from pathlib import Path

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
