"""When a process that cannot be heard any more stops waiting for the others."""

from __future__ import annotations

import pytest
from harness import Clock

from kempner.run.control.heartbeat import LONGER_THAN_ANY, Progress, ProgressWatchdog
from kempner.run.control.protocol import Phase
from kempner.run.process import threads as awake

FLOOR, CEILING = 60.0, 600.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake, "time", clock)
    return clock


def stands_too_long(standstill: ProgressWatchdog, clock: Clock, seconds: float) -> bool:
    """Whether it is too long after `seconds`, looked at once a second."""
    seen = False
    for _ in range(round(seconds)):
        clock.now += 1.0
        seen = standstill.too_long()
    return seen


@pytest.mark.parametrize(
    ("step_seconds", "phase", "limit"),
    [
        (1, Phase.STEP, FLOOR),
        (6, Phase.STEP, FLOOR),
        (20, Phase.STEP, 20 * LONGER_THAN_ANY),
        (100, Phase.STEP, CEILING),
        (1, Phase.SAVE, CEILING),
        (1, Phase.EVAL, CEILING),
    ],
)
def test_a_step_has_a_multiple_of_the_longest_and_a_save_all_the_time_that_a_stop_has(
    step_seconds: int, phase: Phase, limit: float, clock: Clock
) -> None:
    progress = Progress()
    progress.phase = Phase.STEP
    standstill = ProgressWatchdog(progress, FLOOR, CEILING)
    for step in range(1, 4):
        stands_too_long(standstill, clock, step_seconds)
        progress.made(step)
        standstill.too_long()
    if phase is not Phase.STEP:
        progress.phase = phase
        standstill.too_long()
    assert not stands_too_long(standstill, clock, limit)
    assert stands_too_long(standstill, clock, 1)


def test_the_time_until_the_first_step_is_no_measure_of_a_step(clock: Clock) -> None:
    progress = Progress()
    standstill = ProgressWatchdog(progress, FLOOR, CEILING)
    stands_too_long(standstill, clock, 300)
    progress.phase = Phase.STEP
    standstill.too_long()
    assert stands_too_long(standstill, clock, FLOOR + 1)
