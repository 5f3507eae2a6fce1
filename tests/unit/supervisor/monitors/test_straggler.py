"""A straggler is told from a slow run, and both from what passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Connected, Phase, Report
from kempner.run.record.events import SlowDownFound, StragglerFound
from kempner.run.record.ledger import Ledger, read_lines
from kempner.supervisor.monitors.advisers import (
    SPAN,
    Effort,
    StragglerMonitor,
    Streak,
    find_straggler,
)
from kempner.supervisor.monitors.base import (
    Finding,
    Monitors,
    Recovery,
    Remark,
    Reporter,
    SlowDown,
    Snapshot,
    Straggler,
)

SECTION = ResilienceSection(straggler_share=0.2, slowdown_factor=1.5)


@pytest.mark.parametrize(
    ("worked", "step", "found"),
    [
        ([1.0, 1.0, 3.0, 1.0], 3.2, Straggler(2, 3.0, 1.0, 2.0 / 3.2)),
        ([3.0, 3.0, 3.0, 3.0], 3.2, None),  # all alike
        ([1.0, 1.1, 1.2, 1.0], 1.5, None),  # costs too little
        ([0.01, 0.03], 1.0, None),  # three times the work, but of a small part of the step
        ([1.0, 3.0], 3.2, Straggler(1, 3.0, 1.0, 2.0 / 3.2)),
        ([1.0, 1.0, 3.0, 3.0, 1.0], 3.2, Straggler(2, 3.0, 1.0, 2.0 / 3.2)),  # a node of two
        ([2.0], 2.0, None),
    ],
)
def test_who_keeps_the_others_waiting(
    worked: list[float], step: float, found: Straggler | None
) -> None:
    efforts = {rank: Effort(seconds, step) for rank, seconds in enumerate(worked)}
    told = find_straggler(efforts, 0.2)
    assert told == found
    if told is not None:
        assert f"{told.lost:.0%} of the run's time is spent waiting for it" in told.sentence


def test_a_streak_takes_two_looks_to_begin_and_to_end() -> None:
    streak: Streak[int] = Streak()
    looks = [None, 1, None, 1, 1, 1, None, 1, None, None, 2, 2, 3, 3]
    changes = [streak.changes_to(seen) and (streak.state,) for seen in looks]
    assert [change for change in changes if change] == [(1,), (None,), (2,), (3,)]


class Ranks:
    """Ranks that make steps together and report; `work` says how long each one's own part takes."""

    def __init__(self, size: int) -> None:
        self.size, self.now, self.step = size, 0.0, 0
        self.worked, self.waited = [0.0] * size, [0.0] * size
        self.phase = Phase.STEP

    def train(self, seconds: float, work: Callable[[int], float]) -> Iterator[float]:
        """Go on for so long; the time after each step."""
        end = self.now + seconds
        while self.now < end:
            took = [work(rank) for rank in range(self.size)]
            step = max(took) + 0.1
            self.worked = [a + b for a, b in zip(self.worked, took, strict=True)]
            self.waited = [a + step - b for a, b in zip(self.waited, took, strict=True)]
            self.now, self.step = self.now + step, self.step + 1
            yield self.now

    def snapshot(self) -> Snapshot:
        reports = {
            rank: Report(self.step, self.phase, self.worked[rank], self.waited[rank])
            for rank in range(self.size)
        }
        joined = {rank: Connected(rank, f"node{rank}", 1) for rank in range(self.size)}
        return Snapshot(self.now, self.size, reports, joined=joined)


def watched(
    watch: StragglerMonitor, ranks: Ranks, seconds: float, work: Callable[[int], float]
) -> list[tuple[Remark, ...]]:
    """What is found anew while the ranks go on, by each look that finds something."""
    looks = (tuple(watch.check(ranks.snapshot())) for _ in ranks.train(seconds, work))
    return [found for found in looks if found]


@pytest.mark.parametrize("step", [0.05, 1.0, 9.0])
def test_a_rank_slowed_to_a_third_is_named_once_within_a_minute(step: float) -> None:
    ranks, watch = Ranks(4), StragglerMonitor(SECTION, None)
    assert watched(watch, ranks, 60.0, lambda rank: step) == []
    minute = max(60.0, 7 * (3 * step + 0.1))
    ((found, *_),) = watched(watch, ranks, minute, lambda rank: step * (3 if rank == 2 else 1))
    assert isinstance(found, Straggler)
    assert found.rank == 2
    assert found.worked == pytest.approx(3 * step)
    assert found.usual == pytest.approx(step)
    again = watched(watch, ranks, 200.0, lambda rank: step * (3 if rank == 2 else 1))
    assert not any(isinstance(found, Straggler) for later in again for found in later)
    (over,) = watched(watch, ranks, 100.0, lambda rank: step)
    assert Recovery(StragglerFound) in over


def test_a_uniformly_slow_run_has_no_straggler_but_is_slower_than_it_was() -> None:
    ranks, watch = Ranks(4), StragglerMonitor(SECTION, None)
    assert watched(watch, ranks, 100.0, lambda rank: 1.0) == []
    (found,) = watched(watch, ranks, 600.0, lambda rank: 3.0)
    assert found == (SlowDown(pytest.approx(3.1), pytest.approx(1.1)),)
    (over,) = watched(watch, ranks, 60.0, lambda rank: 1.0)
    assert over == (Recovery(SlowDownFound),)


def test_a_restart_is_compared_with_the_run_before_it() -> None:
    ranks, watch = Ranks(2), StragglerMonitor(SECTION, usual=1.0)
    (found,) = watched(watch, ranks, 100.0, lambda rank: 2.0)
    assert found == (SlowDown(pytest.approx(2.1), 1.0),)


def test_one_long_pause_is_neither() -> None:
    ranks, watch = Ranks(3), StragglerMonitor(SECTION, None)
    for _ in range(3):
        assert watched(watch, ranks, 40.0, lambda rank: 0.5) == []
        assert watched(watch, ranks, 1.0, lambda rank: 12.0 if rank == 1 else 0.5) == []


def test_ranks_that_do_not_say_how_long_they_work_are_left_alone() -> None:
    """As those of a program of the user's, of which only the step is known."""
    ranks, watch = Ranks(2), StragglerMonitor(SECTION, None)
    for _ in ranks.train(4 * SPAN, lambda rank: 1.0):
        ranks.worked = ranks.waited = [0.0, 0.0]
        assert watch.check(ranks.snapshot()) == ()


def test_an_adviser_that_fails_is_told_of_once_and_ends_nothing(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Mistaken:
        def check(self, snapshot: Snapshot) -> Sequence[Finding]:
            raise ZeroDivisionError

    advisers, ranks = Monitors(advisers=[Mistaken()]), Ranks(2)
    for _ in range(2):
        assert advisers.check(ranks.snapshot()) == []
    assert capfd.readouterr().err.count("Mistaken has failed, and is not asked again") == 1


def test_other_phases_and_rollbacks_begin_anew() -> None:
    ranks, watch = Ranks(2), StragglerMonitor(SECTION, None)
    assert watched(watch, ranks, SPAN - 1, lambda rank: 1.0) == []
    ranks.phase = Phase.COMPILE
    assert watched(watch, ranks, 100.0, lambda rank: 9.0 * rank) == []
    ranks.phase, ranks.step = Phase.STEP, 0
    assert watched(watch, ranks, 100.0, lambda rank: 1.0) == []


def test_what_is_found_is_in_the_ledger_and_the_node_suspect_if_asked_for(tmp_path: Path) -> None:
    section = ResilienceSection(straggler_is_suspect=True)
    ledger, ranks = Ledger(tmp_path / "ledger.jsonl"), Ranks(3)
    reporter = Reporter(4, ledger, section.straggler_is_suspect)
    watch = StragglerMonitor(section, 0.2)
    for work in (lambda rank: 3.0 if rank == 1 else 1.0, lambda rank: 1.0):
        for look in watched(watch, ranks, 60.0, work):
            for found in look:
                reporter.report(found, ranks.snapshot())
    straggler, suspect, slow, over = read_lines(tmp_path / "ledger.jsonl")
    assert (straggler["event"], straggler["node"], straggler["attempt"]) == (
        "straggler",
        "node1",
        4,
    )
    assert (straggler["rank"], straggler["worked"]) == (1, pytest.approx(3.0))
    assert suspect["event"] == "suspect"
    assert (suspect["node"], suspect["reason"]) == ("node1", straggler["reason"])
    assert (slow["event"], slow["usual"]) == ("slow_down", 0.2)
    assert (over["event"], over["of"]) == ("recovered", "straggler")
