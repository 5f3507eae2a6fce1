"""Save after save after save: nothing grows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from drilling import ALL, note
from harness import launch

pytestmark = pytest.mark.timeout(900 if ALL else 200)

WARM_UP, SAVES = (100, 500) if ALL else (40, 80)
STATE = 3 * 4 * (256 * 256 + 256 + 3 * 256 + 3)
"""Bytes of parameters and optimizer state."""


def test_saves_in_a_row_use_no_more_than_the_first_ones(tmp_path: Path) -> None:
    told = launch(
        Path(__file__).with_name("many_saves.py"), 2, tmp_path / "run", WARM_UP, SAVES, deadline=800
    )
    lines = [json.loads(line) for line in told.splitlines() if line.startswith("{")]
    for rank in (0, 1):
        before, after = (line for line in lines if line["rank"] == rank)
        grown = {key: after[key] - before[key] for key in ("resident", "threads", "descriptors")}
        note("saves in a row", saves=SAVES, state=STATE, **after, grown=grown)
        assert grown["threads"] == 0
        assert grown["descriptors"] == 0
        # What is left of every tenth save would show; a rank has half of the state.
        assert grown["resident"] < STATE / 2 * SAVES / 10
