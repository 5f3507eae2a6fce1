"""The matrix itself: which cells there are and are drawn, and what its comparison sees."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from harness import ROOT
from hypothesis import given
from hypothesis import strategies as st

from matrix.cells import Cell, cells_of, draw
from matrix.compare import RELATIVE, Notes, another_world, same_world
from matrix.kinds import FILES

ALL = [cell for file in FILES.values() for cell in cells_of(file.programs)]

BOUNDARIES = ("save", "last", "evaluation", "epoch")
KINDS = {
    *("plain", "Trainer", "SFT", "DPO", "GRPO", "LoRA"),
    *("Lightning", "Fabric", "Accelerate", "torchtitan"),
}


def test_there_are_600_cells_with_every_kind_every_boundary_and_every_way_to_strike() -> None:
    assert len({cell.name for cell in ALL}) == len(ALL) >= 600
    assert {cell.program.kind for cell in ALL} == KINDS
    for kind in KINDS - {"torchtitan"}:
        cells = [cell for cell in ALL if cell.program.kind == kind]
        assert {cell.ranks for cell in cells} == {1, 2}, kind
        assert {cell.how for cell in cells} >= {"stop", "kill"}, kind
        assert {cell.where.rstrip("+-1") for cell in cells} >= {"save", "last"}, kind
    wheres = [f"{name}{away}" for name in BOUNDARIES for away in ("-1", "", "+1")]
    within = {"within-evaluation", "within-accumulation"}
    assert {cell.where for cell in ALL} == {*wheres, *within, "first", "random"}


@given(st.text(max_size=8))
def test_60_are_drawn_and_some_of_every_kind(commit: str) -> None:
    drawn = [draw(cells_of(file.programs), commit, file.drawn) for file in FILES.values()]
    assert [len(cells) for cells in drawn] == [file.drawn for file in FILES.values()]
    assert sum(map(len, drawn)) == 60
    assert Counter(cell.program.kind for cells in drawn for cell in cells).keys() == KINDS


REFUSED = [cell for cell in ALL if cell.refused]


def test_few_are_refused_and_none_on_as_many_ranks() -> None:
    assert len(REFUSED) <= 0.05 * len(ALL)
    assert {cell.how for cell in REFUSED} == {"world"}
    assert {cell.program.kind for cell in REFUSED} == {"plain", "GRPO", "Lightning", "torchtitan"}


def test_the_page_lists_what_is_refused_and_says_how_much_it_is() -> None:
    page = (ROOT / "docs" / "integrations.md").read_text()
    listed = page[page.index("## What is refused") :]
    assert [cell.name for cell in REFUSED if cell.refused not in listed] == []
    assert f"{len(REFUSED)} of {len(ALL):,} cells ({len(REFUSED) / len(ALL):.1%})" in listed


def test_other_commits_draw_other_cells() -> None:
    cells = cells_of(FILES["test_plain"].programs)
    seen: set[Cell] = set()
    for commit in range(100):
        seen |= draw(cells, str(commit), 24)
    assert len(seen) > 0.8 * len(cells)


def noted(*facts: tuple[str, str, Any]) -> Notes:
    return Notes.of({"fact": name, "place": place, "value": value} for name, place, value in facts)


def step(number: int, samples: list[int], loss: float) -> list[tuple[str, str, Any]]:
    place = f"{number}.0"
    return [
        ("samples", place, samples),
        ("rates", place, [(0.1).hex()]),
        ("loss", place, loss.hex()),
    ]


RUN = [*step(1, [0, 1], 2.0), *step(2, [2, 3], 1.0), ("steps", "end", 2)]


def test_the_same_facts_are_the_same_however_often_they_were_noted() -> None:
    once, twice = noted(*RUN), noted(*step(1, [0, 1], 2.0), *RUN)
    assert list(same_world([once], [once], once=True)) == []
    assert list(same_world([once], [twice], once=False)) == []
    assert list(same_world([once], [twice], once=True)) == ["rank 0: step 1.0 was made 2 times"]


@pytest.mark.parametrize("left_out", range(len(RUN)))
def test_a_fact_that_is_missing_or_too_much_or_another_is_seen(left_out: int) -> None:
    name, place, _ = RUN[left_out]
    whole, part = noted(*RUN), noted(*RUN[:left_out], *RUN[left_out + 1 :])
    other = noted(*RUN, (name, place, "0x1.8p+2"))
    assert list(same_world([whole], [part], once=True)) == [f"rank 0: {name} {place} is missing"]
    (more,) = same_world([part], [whole], once=True)
    assert more == f"rank 0: {name} {place} is there, and should not be"
    (changed,) = same_world([whole], [other], once=False)
    assert changed.startswith(f"rank 0: {name} {place} is ")
    where = place.partition(".")[0]
    assert list(another_world([whole], [part])) == [f"{name} {where} is missing"]
    assert list(another_world([part], [whole])) == [f"{name} {where} is there, and should not be"]
    (elsewhere,) = another_world([whole], [other])
    assert elsewhere.startswith(f"{name} {where} is ")


def test_ranks_share_a_step_and_rounding_is_all_that_may_differ() -> None:
    alone = noted(*step(1, [3, 1, 0, 2], 2.0), *step(2, [4, 5, 6, 7], 1.0))
    shares = [
        noted(*step(1, [0, 1], 1.5), *step(2, [4, 6], 1.25)),
        noted(*step(1, [3, 2], 2.5), *step(2, [5, 7], 0.75 + RELATIVE)),
    ]
    assert list(another_world([alone], shares)) == []
    shares[1] = noted(*step(1, [3, 3], 2.5), *step(2, [5, 7], 0.75 + 6 * RELATIVE))
    samples, loss = another_world([alone], shares)
    assert samples == "samples 1 is [0, 1, 3, 3], not [0, 1, 2, 3]"
    assert loss.startswith("loss 2 is 1.00003")
