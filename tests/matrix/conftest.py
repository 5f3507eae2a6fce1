"""Which cells are played: a part that is drawn by the commit, or all of them by `make long`.

    python -m pytest tests/matrix -k CELL

plays one, drawn or not.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from drilling import ALL
from lengths import commit

from matrix.cells import cells_of, draw
from matrix.kinds import FILES
from matrix.play import Player


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each cell of the file's programs."""
    if "cell" not in metafunc.fixturenames:
        return
    group = FILES[Path(metafunc.module.__file__ or "").stem]
    cells = cells_of(group.programs)
    played = set(cells) if metafunc.config.option.keyword else draw(cells, commit(), group.drawn)
    long = (pytest.mark.drill,)
    metafunc.parametrize(
        "cell",
        [
            pytest.param(cell, id=cell.name, marks=long if ALL or cell not in played else ())
            for cell in cells
        ],
    )


@pytest.fixture
def player(request: pytest.FixtureRequest, shared: Path) -> Player:
    """Plays the cells of this file."""
    return Player(shared, FILES[Path(request.module.__file__).stem].modules)
