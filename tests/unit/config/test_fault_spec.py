"""Faults in plain words, and what is none."""

from __future__ import annotations

import re

import pytest

from kempner.config.resilience import KINDS, Fault, parse_faults


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("kill rank 3 at step 20", ("kill", 3, "step", 20, False, 3.0, 1)),
        ("  hang  rank 0 at step 5 in save ", ("hang", 0, "save", 5, False, 3.0, 1)),
        ("slow rank 1 by 4.5 from step 10", ("slow", 1, "step", 10, True, 4.5, 1)),
        ("nan rank 1 at step 7 attempt 2", ("nan", 1, "step", 7, False, 3.0, 2)),
        ("crash rank 0 in load", ("crash", 0, "load", None, False, 3.0, 1)),
        ("stop rank 2 in start attempt 3", ("stop", 2, "start", None, False, 3.0, 3)),
        ("disk_full rank 0 from step 1", ("disk_full", 0, "save", 1, True, 3.0, 1)),
        ("oom rank 0 at step 2 in eval", ("oom", 0, "eval", 2, False, 3.0, 1)),
        ("kill rank 1 at step 4 in commit", ("kill", 1, "commit", 4, False, 3.0, 1)),
        (
            "flip on gpu-7.x by 9 from step 4 in weights",
            ("flip", None, "weights", 4, True, 9.0, None, "gpu-7.x"),
        ),
        ("kill on n1 at step 4 attempt 2", ("kill", None, "step", 4, False, 3.0, 2, "n1")),
    ],
)
def test_plain_words(text: str, expected: tuple[object, ...]) -> None:
    (fault,) = parse_faults([text])
    assert fault == Fault(" ".join(text.split()), *expected)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "is not a fault; write KIND rank R"),
        ("kill", "is not a fault; write KIND rank R"),
        ("kill rank -1 at step 2", "is not a fault; write"),
        ("kill rank 1 on n1 at step 2", "is not a fault; write"),
        ("kill rank 1 at step 2 please", "is not a fault; write"),
        ("kill rank 1 in save at step 2", "is not a fault; write"),
        ("nuke rank 1 at step 2", "the kinds are kill, stop"),
        ("nan rank 1 at step 2 in save", "nan can happen in step only"),
        ("kill rank 1 at step 2 in bed", "kill can happen in step, start, load, eval, save, stage"),
        ("disk_full rank 1 at step 2 in step", "disk_full can happen in save only"),
        ("kill rank 1", "step needs a step; name one"),
        ("hang rank 1 in save", "save needs a step; name one"),
        ("kill rank 1 at step 3 in load", "load comes before any step; remove the step"),
        ("kill rank 1 by 3 at step 2", "`by` has no effect on kill"),
        ("slow rank 1 by 0.2 from step 2", "`by` must be at least 1"),
    ],
)
def test_what_is_none_is_quoted_in_one_sentence(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        parse_faults(["kill rank 0 at step 1", text])
    assert f'"{text}"' in str(error.value)
    assert "\n" not in str(error.value)


def test_a_fault_on_a_node_stays_there_in_every_attempt() -> None:
    on_node, of_rank = parse_faults(["kill on n1 at step 4", "kill rank 1 at step 4"])
    places = [
        (rank, node, attempt) for rank in (0, 1) for node in ["n1", "n2"] for attempt in (1, 2)
    ]
    assert [p for p in places if on_node.is_of(*p)] == [p for p in places if p[1] == "n1"]
    assert [p for p in places if of_rank.is_of(*p)] == [p for p in places if p[::2] == (1, 1)]


def test_every_kind_can_be_asked_for_in_each_of_its_phases() -> None:
    for kind, phases in KINDS.items():
        for phase in phases:
            when = "" if phase in ("start", "load") else "at step 4 "
            (fault,) = parse_faults([f"{kind} rank 0 {when}in {phase}"])
            assert (fault.kind, fault.phase) == (kind, phase)


@pytest.mark.parametrize(
    ("text", "phase", "steps"),
    [
        ("nan rank 0 at step 3", "step", [3]),
        ("nan rank 0 from step 3", "step", [3, 4, 5]),
        ("kill rank 0 at step 3", "save", []),
        ("kill rank 0 at step 3 in save", "save", [3]),
    ],
)
def test_when_it_is_due(text: str, phase: str, steps: list[int]) -> None:
    (fault,) = parse_faults([text])
    assert [step for step in range(6) if fault.covers(phase, step)] == steps


def test_before_the_first_step() -> None:
    (fault,) = parse_faults(["kill rank 0 in load"])
    assert fault.covers("load", None)
    assert not fault.covers("start", None)
