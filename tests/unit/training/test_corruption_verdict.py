"""Which rank lies, and which checkpoint is certified, as tables and over random lies."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from kempner.run.record.events import (
    CheckpointsCertified,
    CorruptionFound,
    Resumed,
    RolledBack,
    StartedAnew,
)
from kempner.run.record.history import RunHistory
from kempner.training.corruption import (
    Claim,
    CorruptionVerdict,
    StepPart,
    certified_step,
    doubted_step,
    judge,
    judge_memory,
    plan_return,
)

PARTS = [part for part in StepPart if part is not StepPart.MEMORY]


def claims(world: int, shifts: list[int], lies: dict[int, int], part: StepPart) -> list[Claim]:
    """All parts of a step of some ranks, each taken by several; a liar adds a number of its own,
    from some part on."""
    return [
        Claim(each, of, by, 1000 * of + number + (lies.get(by, 0) if each in from_on(part) else 0))
        for shift in shifts
        for of in range(world)
        for number, each in enumerate(PARTS)
        for by in [(of + shift) % world]
    ]


def from_on(part: StepPart) -> list[StepPart]:
    return PARTS[PARTS.index(part) :]


@pytest.mark.parametrize("seed", range(20))
def test_a_rank_that_lies_is_named_by_a_third_one(seed: int) -> None:
    draw = random.Random(seed)
    world, part = draw.randrange(3, 9), draw.choice(PARTS)
    hop = draw.randrange(1, world)
    second = 2 * hop % world or hop % (world - 1) + 1
    liar = draw.randrange(world)
    two = claims(world, [0, hop], {liar: 5}, part)
    unsure = judge(two)
    assert unsure is not None
    assert (unsure.part, unsure.sure) == (part, False)
    assert liar in unsure.ranks
    told = judge([*two, *claims(world, [second], {liar: 5}, part)])
    assert told == CorruptionVerdict(part, (liar,), sure=True)


def test_the_sentence_names_slot_rank_and_host() -> None:
    verdict = CorruptionVerdict(StepPart.SLOT, (1,), sure=True, slot=3)
    said = "in step 9: the loss or gradient of slot 3 of rank 1 on n1 has wrong bits"
    assert said in verdict.sentence(9, ["n0", "n1"])


def test_of_two_ranks_the_one_that_lied_once_is_named_and_one_that_sticks_is_not() -> None:
    part = StepPart.UPDATE
    first = claims(2, [0], {1: 9}, part) + claims(2, [1], {}, part)
    again = claims(2, [0, 1], {}, part)
    assert judge(first + again) == CorruptionVerdict(part, (1,), sure=True)
    sticks = claims(2, [0, 1, 0, 1], {1: 9}, part)
    assert judge(sticks) == CorruptionVerdict(part, (0, 1), sure=False)


def test_a_rank_that_is_alone_names_itself_and_equal_claims_name_none() -> None:
    once = claims(1, [0], {0: 3}, StepPart.SLOT) + claims(1, [0], {}, StepPart.SLOT)
    assert judge(once) == CorruptionVerdict(StepPart.SLOT, (0,), sure=True)
    assert judge(claims(5, [0, 1, 2], {}, StepPart.INPUTS)) is None


def test_where_all_ranks_received_something_wrong_none_is_named() -> None:
    own_claims = claims(4, [0], dict.fromkeys(range(4), 7), StepPart.GRADIENT)
    told = judge(own_claims + claims(4, [1, 2], {}, StepPart.GRADIENT))
    assert told == CorruptionVerdict(StepPart.GRADIENT, (0, 1, 2, 3), sure=False)


@pytest.mark.parametrize(
    ("world", "shards", "liars", "sure"),
    [(6, 2, (1,), True), (6, 2, (2, 3), False), (8, 4, (1,), True), (4, 1, (2,), True)],
)
def test_where_a_whole_replica_lies_one_of_it_may_have_sent_the_others_its_lies(
    world: int, shards: int, liars: tuple[int, ...], sure: bool
) -> None:
    wrong = {rank: 10 + rank for rank in liars}
    second = 2 * shards % world or shards + 1
    told = judge(claims(world, [0, shards, second], wrong, StepPart.SLOT), shards)
    assert told == CorruptionVerdict(StepPart.SLOT, liars, sure)


def test_memory_names_its_own_rank_and_replicas_the_one_that_differs_from_the_others() -> None:
    assert judge_memory([0, 0], [5, 6], shards=2) is None
    told = CorruptionVerdict(StepPart.MEMORY, (1,), sure=True)
    assert judge_memory([False, True], [5, 6], shards=1) == told
    assert judge_memory([0] * 6, [5, 6, 5, 6, 5, 6], shards=2) is None
    told = CorruptionVerdict(StepPart.REPLICA, (3,), sure=True)
    assert judge_memory([0] * 6, [5, 6, 5, 7, 5, 6], shards=2) == told
    told = CorruptionVerdict(StepPart.REPLICA, (1, 3), sure=False)
    assert judge_memory([0] * 4, [5, 6, 5, 7], shards=2) == told


@pytest.mark.parametrize(
    ("committed", "certified", "to"),
    [([], 7, None), ([3, 6, 9], 7, 6), ([3, 6, 9], 9, 9), ([3, 6], 0, 3), ([6, 9], 5, 6)],
)
def test_the_run_goes_back_to_what_is_certified(
    committed: list[int], certified: int, to: int | None
) -> None:
    assert plan_return(committed, certified).to == to


FOUND = CorruptionFound(9, "update", (1,), ("n1",), sure=True, to=4, reason="it lies")
DOUBTED = replace(FOUND, sure=False)


@pytest.mark.parametrize(
    ("events", "certified"),
    [
        ([], 0),
        ([CheckpointsCertified(4), CheckpointsCertified(8)], 8),
        ([CheckpointsCertified(8), Resumed(6)], 6),
        ([CheckpointsCertified(8), Resumed(9)], 8),
        ([CheckpointsCertified(8), FOUND, Resumed(4)], 4),
        ([CheckpointsCertified(8), RolledBack(9, 3, 1, 2)], 3),
        ([CheckpointsCertified(8), StartedAnew()], 0),
    ],
)
def test_what_is_made_again_is_not_certified(events: list[object], certified: int) -> None:
    history = RunHistory({"event": e.name, **e.to_fields()} for e in events)  # type: ignore[attr-defined]
    assert certified_step(history) == certified


@pytest.mark.parametrize(
    ("events", "step"),
    [([], 0), ([FOUND], 0), ([FOUND, DOUBTED], 9), ([DOUBTED, FOUND], 0)],
)
def test_where_it_is_not_known_who_lied_every_step_is_checked_until_there(
    events: list[CorruptionFound], step: int
) -> None:
    assert doubted_step(RunHistory({"event": e.name, **e.to_fields()} for e in events)) == step
