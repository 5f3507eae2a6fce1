"""How fast the run steps, as seen from its reports."""

from __future__ import annotations

import pytest

from kempner.run.control.protocol import Phase, Report
from kempner.supervisor.monitors.base import STEPS_REMEMBERED, PhaseStats, RankConditions, Snapshot


def seen(*reports: tuple[float, int, Phase]) -> PhaseStats:
    """What becomes of the reports of one rank: when, how far, doing what."""
    phase_stats = PhaseStats()
    for at, step, phase in reports:
        phase_stats.check(Snapshot(at, 1, {0: Report(step, phase, 0.0, 0.0)}))
    return phase_stats


STEP, EVAL, SAVE, LOAD = Phase.STEP, Phase.EVAL, Phase.SAVE, Phase.LOAD
COMPILE = Phase.COMPILE


@pytest.mark.parametrize(
    ("reports", "longest"),
    [
        ([], None),
        ([(0, 0, LOAD), (5, 0, LOAD)], None),
        ([(0, 7, STEP)], None),
        ([(0, 7, STEP), (3, 7, STEP)], None),
        ([(0, 7, STEP), (3, 8, STEP)], 3.0),
        ([(0, 7, STEP), (3, 7, STEP), (4, 8, STEP)], 4.0),
        ([(0, 0, STEP), (1, 10, STEP)], 0.1),
        ([(0, 1, STEP), (2, 2, STEP), (3, 3, STEP), (7, 4, STEP)], 4.0),
        ([(0, 1, STEP), (2, 2, STEP), (50, 2, EVAL), (51, 2, STEP), (53, 3, STEP)], 2.0),
        ([(0, 1, STEP), (2, 2, STEP), (90, 3, SAVE), (91, 3, STEP), (93, 4, STEP)], 2.0),
        ([(0, 7, COMPILE), (6, 19, STEP)], 0.5),  # at most
        ([(0, 0, LOAD), (6, 19, STEP)], None),  # it may have gone on from step 18
        ([(0, 9, STEP), (1, 10, STEP), (60, 5, STEP), (61, 6, STEP)], 1.0),  # rolled back
    ],
)
def test_the_longest_step(reports: list[tuple[float, int, Phase]], longest: float | None) -> None:
    assert seen(*reports).quantile(1.0) == longest


def test_the_rank_that_is_ahead_counts() -> None:
    phase_stats = PhaseStats()
    for at, steps in enumerate([(5, 4), (5, 5), (6, 5)]):
        reports = {r: Report(s, STEP, 0.0, 0.0) for r, s in enumerate(steps)}
        phase_stats.check(Snapshot(at, 2, reports))
    assert phase_stats.quantile(1.0) == 2.0
    phase_stats.check(Snapshot(9.0, 2))
    assert phase_stats.quantile(1.0) == 2.0


def test_a_quantile_is_one_of_the_last_steps() -> None:
    slow_then_fast = [(0.0, 0, STEP), (50.0, 1, STEP)]
    slow_then_fast += [(50.0 + n, 1 + n, STEP) for n in range(1, STEPS_REMEMBERED)]
    assert seen(*slow_then_fast).quantile(1.0) == 50.0
    assert seen(*slow_then_fast).quantile(0.95) == 1.0
    one_more = (50.0 + STEPS_REMEMBERED, 1 + STEPS_REMEMBERED, STEP)
    assert seen(*slow_then_fast, one_more).quantile(1.0) == 1.0


def test_what_has_waited_while_the_supervisor_was_suspended_tells_no_duration() -> None:
    """A hundred steps of a second each, read at once after a hundred seconds, were no fast ones."""
    phase_stats = PhaseStats()
    for now, step in [(0.0, 0), (1.0, 1), (2.0, 2), (3.0, 3)]:
        phase_stats.check(Snapshot(now, 1, {0: Report(step, STEP, 0.0, 0.0)}))
    woke = 5.5  # by a clock that stands still meanwhile
    for now, step in [(5.5, 60), (6.0, 103), (7.0, 104), (8.0, 105), (9.0, 106)]:
        report = Report(step, STEP, 0.0, 0.0)
        phase_stats.check(Snapshot(now, 1, {0: report}, around=RankConditions(woke_at=woke)))
    assert phase_stats.quantile(0.01) == 1.0
    assert phase_stats.usual()[STEP].median == 1.0


def test_steps_in_which_storage_was_waited_for_are_not_learned() -> None:
    phase_stats = PhaseStats()
    for at, step, storage in (
        (0, 1, ""),
        (2, 2, ""),
        (50, 2, "/data: EIO"),
        (90, 3, ""),
        (93, 4, ""),
    ):
        report = Report(step, STEP, 0.0, 0.0, storage=storage)
        phase_stats.check(Snapshot(at, 1, {0: report}))
    assert phase_stats.quantile(1.0) == 3.0
