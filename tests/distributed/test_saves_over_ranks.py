"""Saves and loads over several ranks without the training around them."""

from __future__ import annotations

from pathlib import Path

import pytest
from harness import launch

HERE = Path(__file__).parent


@pytest.mark.parametrize("world", [2, 3])
def test_a_failure_on_one_rank_is_told_to_all_and_the_next_save_succeeds(
    tmp_path: Path, world: int
) -> None:
    launch(HERE / "failing_saves.py", world, tmp_path / "run")


def test_any_world_loads_what_any_world_saved_bit_for_bit(tmp_path: Path) -> None:
    launch(HERE / "reshard.py", 4, tmp_path)
