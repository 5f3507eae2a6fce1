"""Learning rates and seeds as functions of the step."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest

from kempner.config.sections import SchedulerSection
from kempner.training.compute.forward_backward import seed_for
from kempner.training.compute.optimizer import learning_rate


def rate(step: int, **fields: object) -> float:
    return learning_rate(step, 2.0, 100, SchedulerSection(**fields))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd", "constant"])
def test_warm_up_is_linear_and_ends_at_the_peak(name: str) -> None:
    rates = [rate(step, name=name, warmup_steps=10) for step in range(1, 12)]
    assert rates[:10] == pytest.approx([0.2 * n for n in range(1, 11)])
    assert rates[10] <= 2.0


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
@pytest.mark.parametrize("floor", [0.0, 0.1, 1.0])
def test_decay_ends_at_the_floor(name: str, floor: float) -> None:
    assert rate(100, name=name, warmup_steps=10, min_lr_ratio=floor) == pytest.approx(2.0 * floor)


def test_shapes_in_the_middle() -> None:
    assert rate(50, name="constant") == 2.0
    assert rate(50, name="linear") == pytest.approx(1.0)
    assert rate(50, name="cosine") == pytest.approx(1.0)
    assert rate(25, name="cosine") == pytest.approx(1 + math.cos(math.pi / 4))
    assert rate(80, name="wsd", decay_steps=20) == 2.0
    assert rate(90, name="wsd", decay_steps=20) == pytest.approx(1.0)
    assert rate(90, name="wsd") == 2.0
    assert rate(95, name="wsd") == pytest.approx(1.0)


@pytest.mark.parametrize("name", ["cosine", "linear", "wsd"])
def test_never_rises_after_the_warm_up(name: str) -> None:
    rates = [rate(step, name=name, warmup_steps=7, min_lr_ratio=0.1) for step in range(7, 101)]
    assert all(later <= earlier for earlier, later in pairwise(rates))


def test_no_warm_up_starts_near_the_peak() -> None:
    assert rate(1, name="constant") == 2.0
    assert rate(1, name="linear") == pytest.approx(1.98)


def test_seeds_differ_in_every_place_and_fit_torch() -> None:
    places = [(s, t, m, r) for s in (0, 1) for t in (1, 2, 11) for m in (0, 1) for r in (0, 1, 10)]
    seeds = [seed_for(*place) for place in places]
    assert len(set(seeds)) == len(places)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seed_for(0, 1, 11, 1) != seed_for(0, 11, 1, 1)


def test_the_seed_of_a_place_is_fixed_for_good() -> None:
    assert seed_for(0, 1, 0, 0) == 3245134355591563000
