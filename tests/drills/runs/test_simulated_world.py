"""kempner's decisions in a simulated world: random schedules of faults, and what must hold."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Iterator
from itertools import count

import pytest
from drilling import ALL, SEED, note
from hypothesis import HealthCheck, Phase, find, settings
from hypothesis import strategies as st
from simulated.checks.mutants import MUTANTS, Mutant
from simulated.checks.oracle import Invariant
from simulated.faults import Fault, Kind, Schedule, draw, one_fault
from simulated.files import in_memory
from simulated.world import simulate

pytestmark = pytest.mark.timeout(7200 if ALL else 300)

SCHEDULES, PARTS = (1000, 10) if ALL else (16, 1)
"""How many runs with their faults, and how many tests share them."""

FAULTS = 30
"""The fewest of a schedule."""

TRIES = 400
"""Schedules within which a mutant has to be caught."""

SHRINK = settings(
    database=None,
    max_examples=400,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)


@pytest.fixture(autouse=True)
def _in_memory() -> Iterator[None]:
    with in_memory():
        yield


def violated(schedule: Schedule) -> Invariant | None:
    violation = simulate(schedule).violation
    return violation.invariant if violation else None


def smaller(schedule: Schedule) -> Schedule:
    """As few of its faults as violate the same invariant."""
    expected = violated(schedule)
    kept = st.lists(
        st.integers(0, 9), min_size=len(schedule.faults), max_size=len(schedule.faults)
    ).map(lambda keep: part_of(schedule, [k > 0 for k in keep]))
    return find(kept, lambda part: violated(part) is expected, settings=SHRINK)


def part_of(schedule: Schedule, keep: list[bool]) -> Schedule:
    faults = tuple(f for f, kept in zip(schedule.faults, keep, strict=True) if kept)
    return Schedule(schedule.seed, schedule.setting, faults)


@pytest.mark.parametrize("part", range(PARTS))
def test_whatever_happens_the_promises_hold(part: int) -> None:
    """No job is requeued twice, revived or stranded: the rest ends for reasons that are counted."""
    events = struck = attempts = hopeless = 0
    excused, done = Counter[str](), list[Schedule]()
    started = time.process_time()
    for seed in count((SEED * PARTS + part) * 1_000_000):
        schedule = draw(seed, FAULTS)
        assert len(schedule.faults) >= FAULTS
        outcome = simulate(schedule)
        if outcome.violation is not None:
            pytest.fail(f"{outcome.violation}, in {smaller(schedule)}")
        if schedule.setting.hopeless:  # no step is ever begun: only that it ends is promised
            hopeless += 1
            continue
        done.append(schedule)
        excused.update(outcome.excused)
        events, struck = events + outcome.events, struck + outcome.struck
        attempts += outcome.attempts
        if len(done) == SCHEDULES // PARTS:
            break
    seconds = time.process_time() - started
    note(
        "simulated world",
        part=part,
        schedules=len(done),
        requeued_twice=0,
        revived=0,
        stranded=0,
        ended_for_a_known_reason=dict(excused.most_common()),
        schedules_that_cannot_begin=hopeless,
        events=events,
        faults=struck,
        attempts=attempts,
        events_per_second=round(events / seconds),
    )
    assert struck >= FAULTS / 2 * len(done)  # the others found no target: a job that waits, say


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.what.replace(" ", "-"))
def test_a_wrong_decision_is_caught(mutant: Mutant) -> None:
    with mutant.planted():
        for seed in range(TRIES):
            if (invariant := violated(draw(seed, FAULTS, mutant.kinds))) is not None:
                assert invariant in mutant.caught_by
                note("mutant", what=mutant.what, caught_by=invariant.name, schedules=seed + 1)
                return
    pytest.fail("not caught")


def test_a_violation_is_shrunk_to_what_it_takes() -> None:
    (mutant,) = (m for m in MUTANTS if m.what == "a job is requeued whatever its state")
    rng = random.Random(SEED)
    others = [one_fault(rng, at * 200.0, kind) for at, kind in enumerate(Kind) if harmless(kind)]
    faults = (*others, Fault(1000.0, Kind.CANCEL))
    with mutant.planted():
        shrunk = smaller(Schedule(SEED, faults=faults))
    assert [fault.kind for fault in shrunk.faults] == [Kind.CANCEL]


def harmless(kind: Kind) -> bool:
    return kind in (Kind.SLOW, Kind.SAVE_SLOW, Kind.DAMAGE, Kind.NAN, Kind.SPIKES)
