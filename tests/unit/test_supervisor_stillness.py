"""A hang is told from a slow step, and the rank that is behind is named."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from harness import wait_until

from kempner.config.sections import ResilienceSection
from kempner.run.messages import Phase, Report
from kempner.supervisor.evidence import of_process
from kempner.supervisor.news import Sighting
from kempner.supervisor.stillness import Stillness

SECTION = ResilienceSection(hang_factor=10.0, hang_floor=60.0, hang_ceiling=600.0)


def seen(*steps: int, phase: Phase = Phase.STEP, at: float = 0.0) -> dict[int, Sighting]:
    return {r: Sighting(Report(s, phase, 0.0, 0.0), at) for r, s in enumerate(steps)}


@pytest.mark.parametrize(
    ("phase", "gap", "patience"),
    [
        (Phase.STEP, 1.0, 60.0),
        (Phase.STEP, 20.0, 200.0),
        (Phase.STEP, 100.0, 600.0),
        (Phase.STEP, None, 600.0),
        (Phase.EVAL, 1.0, 600.0),
        (Phase.SAVE, 1.0, 600.0),
        (Phase.LOAD, None, 600.0),
    ],
)
def test_patience_is_learned_from_the_run(phase: Phase, gap: float | None, patience: float) -> None:
    watch, places = Stillness(SECTION, 0.0), seen(3, 3, phase=phase)
    assert watch.see(places, 1.0, 1.0, gap) is None
    assert watch.patience(gap) == patience
    assert watch.see(places, patience, patience, gap) is None
    hang = watch.see(places, patience + 1.5, patience + 1.5, gap)
    assert hang is not None
    assert f"where {patience:.0f} s are plenty" in hang.sentence


def test_ranks_that_never_report_are_a_hang_in_the_end() -> None:
    watch = Stillness(SECTION, 0.0)
    assert watch.see({}, 600.0, 600.0, None) is None
    hang = watch.see({}, 601.0, 601.0, None)
    assert hang is not None
    assert (hang.laggard, "none has reported" in hang.sentence) == (None, True)


def test_steps_that_vary_fivefold_and_long_evaluations_are_no_hang() -> None:
    watch, now = Stillness(SECTION, 0.0), 0.0
    for step in range(1000):
        now += 20.0 if step % 7 else 100.0
        assert watch.see(seen(step, step, at=now), now, now, 20.0) is None
        if step % 100 == 0:
            now += 500.0
            places = seen(step, step, phase=Phase.EVAL, at=now)
            assert watch.see(places, now, now, 20.0) is None


@pytest.mark.parametrize(
    ("places", "laggard"),
    [
        (seen(7, 6, 7, at=100.0), 1),
        (seen(7, 7, 7, at=100.0), None),
        (seen(6, 6, 7, at=100.0), None),
        (seen(7, 7, at=100.0) | {2: Sighting(Report(7, Phase.STEP, 0.0, 0.0), 10.0)}, 2),
        (seen(7, 6, at=100.0) | {2: Sighting(Report(7, Phase.STEP, 0.0, 0.0), 10.0)}, 2),
    ],
)
def test_the_rank_behind_all_others_is_named(
    places: dict[int, Sighting], laggard: int | None
) -> None:
    watch = Stillness(SECTION, 0.0)
    assert watch.see(places, 0.0, 100.0, 1.0) is None
    hang = watch.see(places, 61.0, 101.0, 1.0)
    assert hang is not None
    assert hang.laggard == laggard


def test_a_stopped_process_is_seen_from_outside() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        os.kill(child.pid, signal.SIGSTOP)
        wait_until(lambda: "State: T (stopped)" in of_process(child.pid), "it is stopped")
    finally:
        child.kill()
        child.communicate()
    assert "cannot be looked at" in of_process(child.pid)
