"""How much of each drill is done, and its raw record."""

from __future__ import annotations

import json
import os
import time

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


def note(drill: str, **facts: object) -> None:
    """Add a line to the raw record, if one is asked for."""
    if record := os.environ.get("KEMPNER_DRILLS_RECORD"):
        line = {"drill": drill, "time": round(time.time(), 1), "seed": SEED, **facts}
        with open(record, "a") as file:
            file.write(json.dumps(line) + "\n")
