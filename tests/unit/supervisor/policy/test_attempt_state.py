"""The life of an attempt: every state has an answer to whatever may happen, and all of them end."""

from __future__ import annotations

from itertools import product
from math import inf

import pytest

from kempner.supervisor.policy.stop import (
    BEGINS,
    DEADLINES,
    OVER,
    STAYS,
    TRANSITIONS,
    AttemptLife,
    AttemptState,
    Deadline,
    Trigger,
)

LAUNCHING, JOINING, RUNNING, STOPPING, FAILING, COLLECTING, KILLING, ABANDONED, ENDED = AttemptState

GRACES = {
    Deadline.STOP: 60.0,
    Deadline.CRASH: 5.0,
    Deadline.EVIDENCE: 3.0,
    Deadline.ABANDON: 15.0,
}

MOVES = {
    LAUNCHING: {
        Trigger.RANK_JOINED: JOINING,
        Trigger.ALL_JOINED: RUNNING,
        Trigger.STOP_REQUESTED: STOPPING,
        Trigger.RANK_FAILED: FAILING,
        Trigger.HANG_FOUND: COLLECTING,
    },
    JOINING: {
        Trigger.ALL_JOINED: RUNNING,
        Trigger.STOP_REQUESTED: STOPPING,
        Trigger.RANK_FAILED: FAILING,
        Trigger.HANG_FOUND: COLLECTING,
    },
    RUNNING: {
        Trigger.STOP_REQUESTED: STOPPING,
        Trigger.RANK_FAILED: FAILING,
        Trigger.HANG_FOUND: COLLECTING,
    },
    STOPPING: {Trigger.RANK_FAILED: FAILING, Trigger.TIME_UP: KILLING},
    FAILING: {Trigger.TIME_UP: KILLING},
    COLLECTING: {Trigger.TIME_UP: KILLING},
    KILLING: {Trigger.TIME_UP: ABANDONED},
    ABANDONED: {},
    ENDED: {},
}
"""What leads from a state to another, besides the end of all ranks."""


def begin(*triggers: tuple[Trigger, float]) -> AttemptLife:
    """A life that has seen all this, each at its time."""
    life = AttemptLife(GRACES, LAUNCHING, 0.0)
    for trigger, now in triggers:
        life = life.after(trigger, now)
    return life


def test_every_state_has_an_answer_to_every_trigger() -> None:
    assert set(TRANSITIONS) == set(product(AttemptState, Trigger))
    assert set(DEADLINES) == set(AttemptState)
    assert set(BEGINS.values()) == set(GRACES)


def next_state(state: AttemptState, trigger: Trigger) -> AttemptState:
    return AttemptLife(GRACES, state, 0.0).after(trigger, 0.0).state


@pytest.mark.parametrize(("state", "trigger"), list(product(AttemptState, Trigger)))
def test_where_it_leads_to(state: AttemptState, trigger: Trigger) -> None:
    ends = {Trigger.ALL_ENDED: ENDED} if state not in OVER else {}
    outstayed = {Trigger.OUTSTAYED: KILLING} if state not in (KILLING, *OVER) else {}
    expected = {**MOVES[state], **ends, **outstayed}.get(trigger)
    assert TRANSITIONS[state, trigger] is (STAYS if expected is None else expected)
    assert next_state(state, trigger) is (state if expected is None else expected)


@pytest.mark.parametrize("state", AttemptState)
def test_every_state_can_end_and_none_follows_the_end(state: AttemptState) -> None:
    reached = {state}
    while more := {next_state(s, t) for s, t in product(reached, Trigger)} - reached:
        reached |= more
    assert (ENDED in reached) == (state is not ABANDONED)
    assert (LAUNCHING in reached) == (state is LAUNCHING)
    assert {s for s in AttemptState if AttemptLife(GRACES, s, 0.0).over} == {ABANDONED, ENDED}
    for last in OVER:
        assert {next_state(last, trigger) for trigger in Trigger} == {last}


@pytest.mark.parametrize("state", AttemptState)
def test_a_state_that_time_ends_has_a_deadline_that_kills(state: AttemptState) -> None:
    kills = set(BEGINS.values()) & DEADLINES[state]
    assert (TRANSITIONS[state, Trigger.TIME_UP] in (KILLING, ABANDONED)) == bool(kills)
    entered_by = {t for s, t in TRANSITIONS if TRANSITIONS[s, t] is state}
    if kills:  # whatever leads there begins one of them
        assert all(BEGINS.get(trigger) in kills for trigger in entered_by)


@pytest.mark.parametrize(
    ("triggers", "state", "since", "until"),
    [
        ([], LAUNCHING, 0.0, inf),
        ([(Trigger.RANK_JOINED, 1.0), (Trigger.RANK_JOINED, 2.0)], JOINING, 1.0, inf),
        ([(Trigger.STOP_REQUESTED, 10.0)], STOPPING, 10.0, 70.0),
        # Asked again, with less time left: the ranks know, and the deadline stays.
        ([(Trigger.STOP_REQUESTED, 10.0), (Trigger.STOP_REQUESTED, 30.0)], STOPPING, 10.0, 70.0),
        ([(Trigger.STOP_REQUESTED, 10.0), (Trigger.RANK_FAILED, 20.0)], FAILING, 20.0, 25.0),
        ([(Trigger.STOP_REQUESTED, 10.0), (Trigger.RANK_FAILED, 69.0)], FAILING, 69.0, 70.0),
        ([(Trigger.RANK_FAILED, 20.0), (Trigger.STOP_REQUESTED, 21.0)], FAILING, 20.0, 25.0),
        ([(Trigger.RANK_FAILED, 20.0), (Trigger.RANK_FAILED, 24.0)], FAILING, 20.0, 25.0),
        ([(Trigger.STOP_REQUESTED, 10.0), (Trigger.HANG_FOUND, 11.0)], STOPPING, 10.0, 70.0),
        ([(Trigger.HANG_FOUND, 10.0), (Trigger.STOP_REQUESTED, 11.0)], COLLECTING, 10.0, 13.0),
        ([(Trigger.HANG_FOUND, 10.0), (Trigger.HANG_FOUND, 11.0)], COLLECTING, 10.0, 13.0),
        # Who is killed has a time of its own to be gone; nothing else brings its end nearer.
        ([(Trigger.HANG_FOUND, 10.0), (Trigger.TIME_UP, 13.0)], KILLING, 13.0, 28.0),
        (
            [(Trigger.HANG_FOUND, 10.0), (Trigger.TIME_UP, 13.0), (Trigger.RANK_FAILED, 14.0)],
            KILLING,
            13.0,
            28.0,
        ),
        (
            [(Trigger.HANG_FOUND, 10.0), (Trigger.TIME_UP, 13.0), (Trigger.TIME_UP, 28.0)],
            ABANDONED,
            28.0,
            28.0,
        ),
    ],
)
def test_the_earliest_deadline_that_was_begun_counts(
    triggers: list[tuple[Trigger, float]], state: AttemptState, since: float, until: float
) -> None:
    life = begin(*triggers)
    assert (life.state, life.since, life.until) == (state, since, until)


def test_the_end_of_the_job_is_nearer_than_any_grace() -> None:
    life = begin((Trigger.STOP_REQUESTED, 10.0))
    assert life.after(Trigger.STOP_REQUESTED, 20.0, within=25.0).until == 45.0
    assert life.after(Trigger.STOP_REQUESTED, 20.0, within=500.0).until == 70.0
    killed = life.after(Trigger.TIME_UP, 70.0, within=6.0)
    assert (killed.state, killed.until) == (KILLING, 76.0)


def test_deadlines_of_ranks_hold_in_some_states_only() -> None:
    assert {s for s in AttemptState if Deadline.RECONNECT not in DEADLINES[s]} == set(OVER)
    missing = [s for s in AttemptState if AttemptLife(GRACES, s, 0.0).holds(Deadline.JOIN)]
    assert missing == [JOINING, STOPPING, FAILING, COLLECTING, KILLING]
