"""The matrix itself: what of it is taken, and whether each cell can happen at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from faulty_storage.cell import (
    AFTER,
    BEFORE,
    INTERVAL,
    PATIENCE,
    FaultyRun,
    Player,
    wrong_after_a_stop,
    wrong_at_the_end,
)
from faulty_storage.matrix import (
    HOW,
    HOWS,
    LOAD,
    REQUEUE,
    SAVE,
    START,
    STEP,
    STOP,
    WHATS,
    WHENS,
    WHERES,
    Cell,
    cells,
    few,
    kinds,
    many,
    values,
)
from faulty_storage.mount import Mount
from faulty_storage.rules import Life, Match, Rule

Operations = Sequence[tuple[str, str]]


def test_twenty_cells_have_every_pair_of_kinds_and_every_value() -> None:
    taken = few()
    assert len(taken) == len(set(taken)) == 20
    for places in combinations(range(4), 2):
        assert pairs(taken, places) == pairs(cells(), places)
    for place, every in enumerate((WHATS, WHERES, WHENS, HOWS)):
        assert {values(cell)[place] for cell in taken} == set(every)


def pairs(taken: Sequence[Cell], places: Sequence[int]) -> set[tuple[str, ...]]:
    return {tuple(kinds(cell)[place] for place in places) for cell in taken}


def test_the_drills_have_every_pair_of_what_where_and_when_for_every_how() -> None:
    taken = many()
    assert len(taken) == len(set(taken)) >= 200
    for pair in combinations(range(HOW), 2):
        places = (*pair, HOW)
        assert {tuple(values(cell)[place] for place in places) for cell in taken} == {
            tuple(values(cell)[place] for place in places) for cell in cells()
        }


@pytest.mark.timeout(300)
def test_each_cell_can_happen_and_a_healthy_storage_changes_nothing(
    storage: Mount, player: Player
) -> None:
    """A run that is stopped and started again, looked at: each fault has an operation to meet."""
    storage.trace()
    run = FaultyRun.make(storage, player.corpus, None)
    job = run.launch(1)
    run.reach(INTERVAL + 2, job)
    before_stop = len(storage.operations())
    job.signal()
    assert job.wait(PATIENCE) == 75, job.output()
    assert wrong_after_a_stop(run) == []
    first = len(storage.operations())
    job = run.launch(1)
    assert job.wait(PATIENCE) == 0, job.output()
    assert wrong_at_the_end(run, player.undisturbed(1)) == []
    done = storage.operations()
    seen = {
        **{when: part(done[:first], when) for when in (START, STEP, SAVE)},
        STOP: done[before_stop:first],
        **{when: part(done[first:], when) for when in (LOAD, REQUEUE)},
    }
    never = {str(cell) for cell in cells() if not happens(cell, seen)}
    assert never == set()


def part(done: Operations, when: str) -> Operations:
    """The operations of a moment."""
    begin = 0
    if when in AFTER:
        match, count = AFTER[when]
        begin = places(done, match)[count - 1] + 1
    rest = done[begin:]
    ends = places(rest, BEFORE[when].match) if when in BEFORE else []
    return rest[: ends[0] if ends else None]


def places(done: Operations, match: Match) -> list[int]:
    return [place for place, one in enumerate(done) if match.fits(*one)]


def happens(cell: Cell, seen: Mapping[str, Operations]) -> bool:
    life = Life(Rule("", cell.what, Match(WHERES[cell.where].paths, cell.operations)))
    return any(life.meet(*one, now=0.0) for one in seen[cell.when])
