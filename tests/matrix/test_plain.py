"""Plain loops with features of every kind: no stop, no kill and no other world is to be seen."""

from __future__ import annotations

from pathlib import Path

from matrix.cells import Cell
from matrix.play import Player


def test_a_disturbed_run_is_as_the_undisturbed_one(
    cell: Cell, player: Player, tmp_path: Path
) -> None:
    differing = player.play(cell, tmp_path)
    assert not differing, "\n".join(differing[:12])
