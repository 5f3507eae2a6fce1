"""Ranks that wait for each other for ever are told from ranks that only wait."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kempner.run.control.protocol import Phase, Report
from kempner.run.process.collectives import (
    CollectiveCall,
    CollectivesUnderWay,
    as_range,
    collectives_under_way,
    read_trace,
)
from kempner.supervisor.monitors.base import RankConditions, Snapshot
from kempner.supervisor.monitors.deadlocks import (
    CONFIRMED,
    LEFT,
    DeadlockDetector,
    RankWait,
    find_deadlock,
    named,
)

OPERATIONS = ("all_reduce", "broadcast", "all_gather", "barrier")
WORLD = 4
Call = tuple[tuple[int, ...], str]
"""A collective in a program: the ranks of its group, and the operation."""


@dataclass
class Ranks:
    """A world that carries out programs of collectives, each of which waits for all members."""

    programs: Sequence[Sequence[Call]]
    at: list[int] = field(default_factory=lambda: [0] * WORLD)
    begun: list[dict[tuple[int, ...], int]] = field(
        default_factory=lambda: [{} for _ in range(WORLD)]
    )
    waiting: list[bool] = field(default_factory=lambda: [False] * WORLD)

    def step(self, rank: int) -> None:
        """A rank that is at work comes to its next collective, if it has another."""
        if self.waiting[rank] or self.at[rank] >= len(self.programs[rank]):
            return
        group, _ = self.programs[rank][self.at[rank]]
        self.begun[rank][group] = self.begun[rank].get(group, 0) + 1
        self.waiting[rank] = True
        self._let_go(group)

    def _let_go(self, group: tuple[int, ...]) -> None:
        here = [self._call(rank) for rank in group]
        numbers = {self.begun[rank].get(group) for rank in group}
        if len(set(here)) == 1 and here[0] is not None and len(numbers) == 1:
            for rank in group:
                self.waiting[rank] = False
                self.at[rank] += 1

    def _call(self, rank: int) -> Call | None:
        return self.programs[rank][self.at[rank]] if self.waiting[rank] else None

    @property
    def ended(self) -> list[int]:
        return [rank for rank in range(WORLD) if self.at[rank] >= len(self.programs[rank])]

    def waits(self) -> dict[int, RankWait]:
        found = {}
        for rank in range(WORLD):
            if (call := self._call(rank)) is None:
                continue
            group, operation = call
            members = as_range(group)
            assert members is not None
            number = self.begun[rank][group]
            one = CollectiveCall(str(group), members, number, operation)
            begun = {str(other): count for other, count in self.begun[rank].items()}
            found[rank] = RankWait(CollectivesUnderWay((one,), begun), f"train.py:{self.at[rank]}")
        return found

    def stands(self) -> bool:
        """Whether no rank can do anything any more, though some have not ended."""
        return len(self.ended) < WORLD and all(
            self.waiting[rank] for rank in range(WORLD) if rank not in self.ended
        )


groups = st.sampled_from([(0, 1, 2, 3), (0, 1), (2, 3), (0, 2), (1, 3), (1, 2), (0, 3)])
calls = st.lists(st.tuples(groups, st.sampled_from(OPERATIONS)), min_size=1, max_size=8)
schedules = st.lists(st.integers(0, WORLD - 1), max_size=60)


def programs(script: Sequence[Call]) -> list[list[Call]]:
    return [[call for call in script if rank in call[0]] for rank in range(WORLD)]


@given(calls, schedules)
def test_ranks_of_a_sound_program_are_never_in_a_deadlock(
    script: list[Call], schedule: list[int]
) -> None:
    world = Ranks(programs(script))
    for rank in schedule:
        world.step(rank)
        assert find_deadlock(world.waits(), world.ended) is None


@given(calls, schedules, st.data())
def test_a_deadlock_is_found_exactly_where_ranks_can_never_go_on(
    script: list[Call], schedule: list[int], data: st.DataObject
) -> None:
    """One rank makes two of its calls in another order, or one with another operation."""
    mistaken = programs(script)
    rank = data.draw(st.sampled_from([r for r in range(WORLD) if mistaken[r]]))
    at = data.draw(st.integers(0, len(mistaken[rank]) - 1))
    other = data.draw(st.integers(0, len(mistaken[rank]) - 1))
    if other == at:
        mistaken[rank][at] = (mistaken[rank][at][0], data.draw(st.sampled_from(OPERATIONS)))
    else:
        own = mistaken[rank]
        own[at], own[other] = own[other], own[at]
    world = Ranks(mistaken)
    for one in [*schedule, *(list(range(WORLD)) * 12)]:
        found = find_deadlock(world.waits(), world.ended)
        if found is not None:
            before = {r: world.at[r] for r in found.waits}
            for other in list(range(WORLD)) * 12:  # whatever the others still do
                world.step(other)
            assert {r: world.at[r] for r in found.waits} == before
            return
        world.step(one)
    assert not world.stands()


def test_the_sentence_names_ranks_operations_and_lines() -> None:
    group = ("0", (0, 4, 1), 7)
    waits = {
        rank: RankWait(
            CollectivesUnderWay((CollectiveCall(*group, "broadcast"),), {"0": 7}), "train.py:13"
        )
        for rank in range(3)
    }
    waits[3] = RankWait(
        CollectivesUnderWay((CollectiveCall(*group, "all_reduce"),), {"0": 7}), "train.py:14"
    )
    found = find_deadlock(waits, ())
    assert found is not None
    assert found.sentence == (
        "deadlock: ranks 0 to 2 wait in broadcast at train.py:13, "
        "rank 3 waits in all_reduce at train.py:14"
    )


def report(operation: str, number: int = 7) -> Report:
    one = CollectiveCall("0", (0, 2, 1), number, operation)
    return Report(
        5, Phase.STEP, 1.0, 1.0, line="a.py:1", collectives=CollectivesUnderWay((one,), {"0": 7})
    )


def snapshot(now: float, ended: Sequence[int] = (), **more: Report) -> Snapshot:
    reports = {int(name[1:]): said for name, said in more.items()}
    return Snapshot(now, 2, reports, around=RankConditions(ended=frozenset(ended)))


def test_a_deadlock_counts_once_it_is_confirmed() -> None:
    detector = DeadlockDetector()
    crossed = {"r0": report("barrier"), "r1": report("all_reduce")}
    assert detector.check(snapshot(0.0, **crossed)) == ()
    assert detector.check(snapshot(CONFIRMED - 0.1, **crossed)) == ()
    (hang,) = detector.check(snapshot(CONFIRMED, **crossed))
    assert hang.deadlock == "deadlock: all_reduce at a.py:1, barrier at a.py:1"
    moved = {"r0": report("barrier", 8), "r1": report("all_reduce", 8)}
    assert detector.check(snapshot(CONFIRMED + 0.1, **moved)) == ()


def test_a_rank_that_has_ended_may_have_sent_its_part_a_moment_before() -> None:
    detector = DeadlockDetector()
    waits = {"r0": report("barrier")}
    assert detector.check(snapshot(0.0, [1], **waits)) == ()
    assert detector.check(snapshot(LEFT - 0.1, [1], **waits)) == ()
    (hang,) = detector.check(snapshot(LEFT, [1], **waits))
    assert hang.laggard == 1
    assert hang.sentence.endswith("rank 0 waits in barrier at a.py:1, and rank 1 has ended")


def test_a_trace_of_the_recorder_is_read() -> None:
    def entry(number: int, name: str, **other: object) -> dict[str, object]:
        return {
            "process_group": ("1", "undefined"),
            "collective_seq_id": number,
            "profiling_name": f"gloo:{name}",
            "retired": False,
            "is_p2p": False,
            "thread_id": "42",
        } | other

    entries = [
        entry(1, "broadcast", retired=True),
        entry(2, "all_reduce"),
        entry(2, "all_reduce", thread_id="43"),
        entry(9, "send", is_p2p=True),
        entry(4, "barrier", process_group=("2", "uneven")),
    ]
    found = read_trace({"entries": entries}, {"1": (0, 2, 1)}, 42)
    assert found.under_way == (CollectiveCall("1", (0, 2, 1), 2, "all_reduce"),)
    assert found.begun == {"1": 9, "2": 4}


@given(st.integers(0, 9), st.integers(1, 9), st.integers(1, 9))
def test_ranks_at_equal_distances_are_a_range(first: int, count: int, step: int) -> None:
    found = as_range(list(range(first, first + count * step, step)))
    assert found is not None
    assert list(CollectiveCall("", found, 1, "").ranks) == list(
        range(first, first + count * step, step)
    )


def test_other_ranks_are_none_and_are_not_judged() -> None:
    assert as_range([0, 1, 3]) is None
    assert as_range([]) is None


def test_ranks_are_named() -> None:
    assert named([3]) == "rank 3"
    assert named([2, 1, 0]) == "ranks 0 to 2"
    assert named([0, 5]) == "ranks 0 and 5"
    assert named([0, 1, 2, 4, 5, 6, 7]) == "ranks 0 to 2 and 4 to 7"
    assert named(range(0, 12, 2)) == "ranks 0, 2, 4, 6 and 2 more"


@pytest.mark.parametrize("answer", [{"entries": [{}]}, {"entries": None}, RuntimeError("away"), 7])
def test_a_recorder_that_answers_otherwise_costs_a_rank_nothing(
    answer: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dump(*_: object) -> bytes:
        if isinstance(answer, Exception):
            raise answer
        return pickle.dumps(answer)

    world = SimpleNamespace(pg_names={}, pg_group_ranks={})
    monkeypatch.setitem(
        sys.modules, "torch._C._distributed_c10d", SimpleNamespace(_dump_fr_trace=dump)
    )
    monkeypatch.setitem(
        sys.modules, "torch.distributed.distributed_c10d", SimpleNamespace(_world=world)
    )
    assert collectives_under_way(None) == CollectivesUnderWay()
