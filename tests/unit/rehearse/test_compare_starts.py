"""Records of ranks are compared step by step, and the boundaries are found in them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rank_lines import STEPS, lines, record

from kempner.rehearse.compare import (
    COMPARED,
    changed,
    differences,
    lost_evaluations,
    parse,
    samples_elsewhere,
)
from kempner.rehearse.rehearsal import boundaries, plan


def test_a_resumed_run_that_is_the_same_has_no_differences() -> None:
    whole = record(evaluated=(4, 8))

    assert differences([whole], [record(first=7)]) == []
    assert (
        lost_evaluations(
            [whole], [[record(last=6, evaluated=(4,))], [record(first=7, evaluated=(8,))]]
        )
        == []
    )
    assert changed(whole, record(first=7), 7) == []


@pytest.mark.parametrize("field", COMPARED)
def test_each_field_is_compared_and_the_first_step_is_told(field: str) -> None:
    names = {"generators": "torch_generator", "rate": "rates"}
    wrong: Any = ["x"] if field in ("samples", "losses") else {"optimizer": "x"}
    whole = [json.loads(line) for line in lines(first=7)]
    other = parse(
        json.dumps({**line, names.get(field, field): wrong} if "ended" in line else line)
        for line in whole
    )

    found = differences([record()], [other])

    assert [(one.field, one.step, one.rank) for one in found] == [(field, 7, 0)]


def test_the_causes_come_before_what_follows_from_them() -> None:
    other = record(first=7, weights={"optimizer": "x"}, samples={7: ["other"]})

    assert [one.field for one in differences([record()], [other])] == ["samples", "weights"]


def test_an_evaluation_is_lost_unless_a_resume_makes_it_up() -> None:
    whole, stopped = record(evaluated=(6,)), record(last=6)
    made_up = parse([json.dumps({"after": 0, "evaluation": ["e6"]}), *lines(first=7)])

    lost = lost_evaluations([whole], [[stopped], [record(first=7)]])

    assert [one.step for one in lost] == [6]
    assert lost_evaluations([whole], [[stopped], [made_up]]) == []


def test_a_variable_that_begins_anew_is_told_from_one_that_is_otherwise() -> None:
    other = record(first=7)
    seen = other.began[7].variables["best"]
    anew = parse([line.replace('"7"', '"1"') for line in lines(first=7, last=7)])

    assert [one.anew for one in changed(record(), anew, 7)] == [True]
    assert changed(record(), other, 7) == []
    assert seen.words == "7"


def test_a_line_that_a_killed_rank_did_not_finish_is_left_out() -> None:
    assert parse([*lines(last=3), '{"began": 4, "vari']).last == 3


def test_boundaries_are_where_something_else_than_a_step_comes() -> None:
    epochs = {step: [f"s{step % 7}"] for step in range(1, STEPS + 1)}

    found = boundaries(record(samples=epochs, evaluated=(5, 10, 15), saved=(4, 8, 12, 16)))

    assert found == {
        4: "a save",
        5: "an evaluation",
        7: "an epoch ends",
        14: "an epoch ends",
        15: "an evaluation",
        16: "a save",
    }


@given(
    last=st.integers(5, 60),
    saved=st.sets(st.integers(1, 60)),
    evaluated=st.sets(st.integers(1, 60)),
)
def test_a_plan_has_a_stop_first_and_a_kill_and_fits(
    last: int, saved: set[int], evaluated: set[int]
) -> None:
    seen = record(last=last, saved=tuple(saved), evaluated=tuple(evaluated))

    chosen = plan(seen)

    assert not chosen[0].kills
    assert any(one.kills for one in chosen)
    steps = [one.step for one in chosen]
    assert steps == sorted(set(steps))
    assert steps[0] >= 1
    assert steps[-1] < last


def test_on_fewer_ranks_samples_may_be_cut_otherwise_but_come_once() -> None:
    two = [
        record(samples={s: [f"{s}a"] for s in range(1, STEPS + 1)}),
        record(samples={s: [f"{s}b"] for s in range(1, STEPS + 1)}),
    ]
    whole = record(first=7, samples={s: [f"{s}b", f"{s}a"] for s in range(7, STEPS + 1)})
    halves = [f"{s}{half}" for s in range(7, STEPS + 1) for half in "ab"]
    cut = record(first=7, last=STEPS, samples={7 + n: [row] for n, row in enumerate(halves[:14])})
    twice = record(first=7, samples={s: ["7a", "7b"] for s in range(7, STEPS + 1)})
    own = record(first=7, samples={s: [f"{s}c"] for s in range(7, STEPS + 1)})

    assert samples_elsewhere(two, [whole], 6) is True
    assert samples_elsewhere(two, [cut], 6) is True
    assert samples_elsewhere(two, [twice], 6) is False
    drawn = record(first=7, samples={s: [f"{s}a"] for s in range(7, STEPS + 1)})
    again = [record(samples={s: [half] for s in range(1, STEPS + 1)}) for half in "ab"]
    half = record(first=7, samples={s: ["a"] for s in range(7, STEPS + 1)})

    assert samples_elsewhere(two, [own], 6) is None
    assert samples_elsewhere(two, [drawn], 6) is None
    assert samples_elsewhere(again, [half], 6) is False
