"""When a loss is suspicious, and where a run goes back to: pure judgements, as tables."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest

from kempner.checkpoint.format.manifest import Rollback, TrainState
from kempner.config.resilience import ResilienceSection
from kempner.run.record.history import RunHistory
from kempner.training.anomalies import (
    FEWEST_LOSSES,
    Health,
    Numbers,
    find_anomaly,
    observe,
    plan_rollback,
    remembered,
)

RULE = ResilienceSection(spike_window=32, rollback_after=3)
FLAT = [3.0] * 20
NOISY = [3.0 + 0.1 * (n % 5 - 2) for n in range(20)]
"""Median 3, median absolute deviation 0.1: a spread of 0.148."""


def numbers(loss: float, norm: float = 1.0, step: int = 1) -> Numbers:
    return Numbers(TrainState(step, 8 * step, 64 * step), loss, norm, rate=1e-3)


@pytest.mark.parametrize(
    ("before", "loss", "norm", "event"),
    [
        ([], 3.0, 1.0, None),
        ([], math.nan, 1.0, "step_skipped"),
        ([], 3.0, math.inf, "step_skipped"),
        ([], -math.inf, 1.0, "step_skipped"),
        ([3.0] * (FEWEST_LOSSES - 1), 1e6, 1.0, None),
        ([3.0] * FEWEST_LOSSES, 1e6, 1.0, "loss_spike"),
        (FLAT, 3.29, 1.0, None),
        (FLAT, 3.31, 1.0, "loss_spike"),
        (NOISY, 4.4, 1.0, None),
        (NOISY, 4.5, 1.0, "loss_spike"),
        (NOISY, 0.0, 1.0, None),
        (NOISY, 3.0, 1e9, None),
        ([*NOISY, *[90.0] * 9], 4.4, 1.0, None),
        ([*NOISY, *[90.0] * 9], 9.0, 1.0, "loss_spike"),
        ([0.0] * 20, 1e-3, 1.0, "loss_spike"),
        ([0.0] * 20, 0.0, 1.0, None),
    ],
)
def test_what_is_suspicious(
    before: Sequence[float], loss: float, norm: float, event: str | None
) -> None:
    anomaly = find_anomaly(before, numbers(loss, norm), RULE)
    assert (anomaly.event.name if anomaly else None) == event
    assert anomaly is None or anomaly.reason


def follow(losses: Sequence[float]) -> Health:
    health = Health()
    for step, loss in enumerate(losses, 1):
        health, _ = observe(health, numbers(loss, step=step), RULE)
    return health


@pytest.mark.parametrize(
    ("then", "suspects", "trouble"),
    [
        ([3.0], 0, None),
        ([math.nan], 1, None),
        ([math.nan, 90.0], 2, None),
        ([math.nan, 90.0, 3.0, 90.0], 1, None),
        ([math.nan, 90.0, math.nan], 3, 23),
        ([math.nan, 90.0, math.nan, 90.0], 4, 23),
        ([math.nan, 90.0, math.nan, 3.0], 0, 23),
    ],
)
def test_three_in_a_row_are_trouble(then: list[float], suspects: int, trouble: int | None) -> None:
    health = follow([*NOISY, *then])
    assert health.suspects == suspects
    assert health.sound == (suspects == 0 and trouble is None)
    assert (health.trouble.step if health.trouble else None) == trouble
    assert 90.0 not in health.losses
    assert all(map(math.isfinite, health.losses))


def test_only_the_last_sound_losses_are_kept() -> None:
    assert follow([float(n) for n in range(100, 0, -1)]).losses == tuple(range(32, 0, -1))


def test_a_loss_that_falls_with_noise_is_never_suspicious() -> None:
    """The shape of a training loss: a power law, with two percent of noise, over 5,000 steps."""
    noise = random.Random(5)
    health, rule = Health(), ResilienceSection()
    for step in range(1, 5001):
        loss = (2.0 + 6.0 * step**-0.3) * (1 + 0.02 * noise.gauss(0, 1))
        health, anomaly = observe(health, numbers(loss, step=step), rule)
        assert anomaly is None, (step, anomaly)


def back(at: int, to: int) -> Rollback:
    return Rollback(at, to, 8 * to, 8 * at)


@pytest.mark.parametrize(
    ("committed", "rollbacks", "to"),
    [
        ([], [], None),
        ([10, 20], [], 20),
        ([10, 20], [back(26, 20)], 10),
        ([10, 20, 30], [back(26, 20)], 30),
        ([10, 20, 30], [back(30, 20)], 10),
        ([10], [back(26, 20), back(27, 10)], 10),
        ([10, 20], [back(8, 5), back(9, 5), back(26, 20)], 10),
        ([10, 20], [back(26, 20), back(26, 10), back(26, 10)], None),
        ([10, 40], [back(26, 20), back(26, 10), back(26, 10)], 40),
    ],
)
def test_where_to_go_back_to(
    committed: list[int], rollbacks: list[Rollback], to: int | None
) -> None:
    plan = plan_rollback(committed, rollbacks, budget=3)
    assert plan.to == to
    assert plan.reason


def test_without_a_budget_there_is_no_way_back() -> None:
    assert plan_rollback([10], [], budget=0).to is None


def test_the_ledger_remembers_the_rollbacks_of_this_run() -> None:
    first = {"event": "rolled_back", "attempt": 1, "at": 26, "to": 20, "start": 160, "end": 208}
    second = {**first, "attempt": 2, "at": 27, "to": 10}
    other = {"event": "checkpoint_committed", "step": 10}
    assert remembered(RunHistory([{"event": "started"}, first, other, second])) == (
        Rollback(26, 20, 160, 208),
        Rollback(27, 10, 160, 208),
    )
    assert remembered(RunHistory([first, {"event": "started"}, second])) == (
        Rollback(27, 10, 160, 208),
    )
