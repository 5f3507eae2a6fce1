"""The real manager, vote, final save and loops, on ranks that take turns in a random order.

No rank ever waits for another that will not come, and no two meet in different collectives.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from drilling import ALL, SEED, note
from simulated.rank_order.edges import Edges
from simulated.rank_order.mutants import MUTANTS, Mutant
from simulated.rank_order.plan import draw
from simulated.rank_order.world import quiet, simulate

pytestmark = pytest.mark.timeout(7200 if ALL else 300)

SCHEDULES = 100_000 if ALL else 1_500

TRIES = 1_000
"""Schedules within which a mutant has to be found."""


@pytest.fixture
def edges() -> Iterator[Edges]:
    edges = Edges()
    with edges.installed(), quiet():
        yield edges


def seed_of(number: int) -> int:
    return SEED * 1_000_000 + number


def test_no_order_of_the_ranks_parts_them(edges: Edges) -> None:
    ends: Counter[str] = Counter()
    events: Counter[str] = Counter()
    turns = collectives = kept = 0
    started = time.process_time()
    for number in range(SCHEDULES):
        outcome = simulate(edges, draw(seed_of(number)))
        assert not outcome.violation, f"seed {seed_of(number)}: {outcome.violation}"
        ends, events = ends + outcome.ends, events + outcome.events
        turns, collectives = turns + outcome.turns, collectives + outcome.collectives
        kept += outcome.kept
    seconds = time.process_time() - started
    note(
        "rank order",
        schedules=SCHEDULES,
        turns=turns,
        collectives=collectives,
        kept_in_memory=kept,
        schedules_per_second=round(SCHEDULES / seconds, 1),
        ends=dict(ends),
        events=dict(events),
    )
    often = SCHEDULES // 100
    assert min(ends[end] for end in ("COMPLETED", "STOPPED", "CheckpointWriteError")) > often
    assert min(ends[end] for end in ("DivergedError", "SupersededError")) > often // 10
    assert min(events[event] for event in ("checkpoint_failed", "evaluated", "resumed")) > often
    assert events["rolled_back"] > often
    assert kept > SCHEDULES


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what.replace(" ", "-"))
def test_control_flow_that_depends_on_something_local_is_found(
    edges: Edges, mutant: Mutant
) -> None:
    with mutant.planted():
        for number in range(TRIES):
            if violation := simulate(edges, draw(seed_of(number))).violation:
                kind = violation.partition(":")[0]
                note("rank order mutant", what=mutant.what, found=kind, schedules=number + 1)
                return
    pytest.fail("not found")
