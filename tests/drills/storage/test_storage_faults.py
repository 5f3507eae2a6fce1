"""Storage that fails for a moment never ends a run: the matrix of faults, places and moments."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict

import pytest
from drilling import ALL, note
from faulty_storage.cell import Outcome, Player
from faulty_storage.matrix import Cell, few, many

pytestmark = pytest.mark.timeout(900)

CELLS = many() if ALL else few()
AT_ONCE = 6 if ALL else 2
"""Most of a cell is waiting for a fault to pass, so several are played side by side."""


@pytest.fixture(scope="module")
def outcomes(
    request: pytest.FixtureRequest, player: Player, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[Cell, Future[Outcome]]]:
    """The outcomes to come of all cells that were asked for, in their order."""
    asked = [
        item.callspec.params["cell"]
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path
    ]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        yield {
            cell: pool.submit(
                player.play, cell, world_of(cell), tmp_path_factory.mktemp("cell") / "s"
            )
            for cell in asked
        }
        pool.shutdown(cancel_futures=True)


def world_of(cell: Cell) -> int:
    """Two ranks for one cell in six."""
    return 2 if CELLS.index(cell) % 6 == 5 else 1


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_fault_that_passes_costs_nothing(
    cell: Cell, outcomes: dict[Cell, Future[Outcome]]
) -> None:
    """The injector's log says that it happened when it should; nothing else can be seen of it."""
    outcome = outcomes[cell].result()
    note("storage fault", **asdict(cell), world=world_of(cell), **asdict(outcome))
    assert outcome.wrong == []
