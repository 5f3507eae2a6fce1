"""How much of each drill is done, and its raw record."""

from __future__ import annotations

import os
import shlex
from pathlib import Path

import records

ALL = os.environ.get("KEMPNER_DRILLS") == "all"
"""Everything (`make long`), or a subset with a fixed seed that fits beside the other tests."""

SEED = int(os.environ.get("KEMPNER_DRILLS_SEED", "20"))

SMALLEST_MODEL = (
    "--model.dim=8",
    "--model.n_layers=1",
    "--model.n_heads=1",
    "--model.ffn_dim=8",
    "--train.seq_len=16",
)
"""Overrides for steps of next to no work."""


PROVES = {
    "tests/distributed": ("kempner/data", "kempner/model", "kempner/training"),
    "tests/drills/corruption": ("kempner/model", "kempner/training"),
    "tests/drills/rehearsals": ("kempner/rehearse", "kempner/training"),
    "tests/drills/saves": ("kempner/checkpoint", "kempner/training"),
    "tests/drills": ("kempner/checkpoint", "kempner/run", "kempner/supervisor", "kempner/training"),
    "tests/matrix": ("kempner/checkpoint", "kempner/training"),
    "tests/slurm/stops/test_wrapped_scripts": (
        "kempner/cli/program",
        "kempner/project/wrap",
        "kempner/supervisor",
    ),
    "tests/unit/supervisor/watchdog": ("kempner/cluster", "kempner/run", "kempner/supervisor"),
    "tests/slurm": ("kempner/cluster", "kempner/run", "kempner/supervisor"),
}
"""The code that the tests of a folder prove."""

_noted: dict[str, list[records.Row]] = {}
"""What this process has recorded, by test."""


def note(drill: str, **facts: object) -> None:
    """Add a row to the record, if one is asked for, in the place of those of this test."""
    if record := os.environ.get("KEMPNER_DRILLS_RECORD"):
        test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0]
        much = "KEMPNER_DRILLS=all " if ALL else ""
        command = f"{much}KEMPNER_DRILLS_SEED={SEED} pytest {shlex.quote(test)}"
        told = records.header(proved_by(test), command)
        rows = _noted.setdefault(test, [])
        rows.append({"drill": drill, "test": test, **facts, **told})
        records.write(Path(record), rows, by=("test",))


def proved_by(test: str) -> tuple[str, ...]:
    """The folders whose code a test proves."""
    return next(folders for place, folders in PROVES.items() if test.startswith(place))
