"""A matrix that cannot fail proves nothing: a planted mistake is seen by cells that are drawn."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from drilling import note

from matrix.cells import cells_of, draw
from matrix.kinds import FILES
from matrix.play import PROGRAMS, Player

pytestmark = [pytest.mark.drill, pytest.mark.timeout(600)]


def mutants() -> list[str]:
    """The names of the public functions of `programs/mutants.py`, which a rank imports."""
    module = ast.parse((PROGRAMS / "mutants.py").read_text())
    functions = [entry.name for entry in module.body if isinstance(entry, ast.FunctionDef)]
    return [name for name in functions if not name.startswith("_")]


@pytest.mark.parametrize("mutant", mutants())
def test_a_planted_mistake_is_seen_by_a_cell_that_is_drawn(
    mutant: str, shared: Path, tmp_path: Path
) -> None:
    file = FILES["test_plain"]
    player = Player(shared, file.modules, mutant)
    cells = cells_of(file.programs)
    drawn = draw(cells, "as for a commit", file.drawn)
    for cell in cells:
        if cell in drawn and (seen := player.play(cell, tmp_path / cell.name)):
            note("matrix", mutant=mutant, cell=cell.name, seen=seen[0])
            return
    pytest.fail("no cell has seen it")
