"""Which cells are played: a part that is drawn by the commit, or all of them by `make long`.

    python -m pytest tests/matrix -k CELL

plays one, drawn or not.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import pytest
from drilling import ALL
from records import commit

from matrix import snippets
from matrix.cells import Cell, cells_of, draw
from matrix.kinds import FILES
from matrix.play import Player
from matrix.snippets import Case


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test for each cell of the file's programs, and for each case of a snippet."""
    seed = commit().rstrip("+")  # the same while one works on it
    if "cell" in metafunc.fixturenames:
        group = FILES[Path(metafunc.module.__file__ or "").stem]
        cells = cells_of(group.programs)
        _parametrize(metafunc, "cell", cells, draw(cells, seed, group.drawn))
    if "case" in metafunc.fixturenames:
        _parametrize(metafunc, "case", snippets.CASES, snippets.draw(snippets.CASES, seed))


def _parametrize(
    metafunc: pytest.Metafunc,
    name: str,
    every: Sequence[Cell | Case],
    drawn: Collection[Cell | Case],
) -> None:
    asked_for, long = bool(metafunc.config.option.keyword), (pytest.mark.drill,)
    metafunc.parametrize(
        name,
        [
            pytest.param(
                one, id=one.name, marks=long if ALL or not (asked_for or one in drawn) else ()
            )
            for one in every
        ],
    )


@pytest.fixture
def player(request: pytest.FixtureRequest, shared: Path) -> Player:
    """Plays the cells of this file."""
    return Player(shared, FILES[Path(request.module.__file__).stem].modules)
