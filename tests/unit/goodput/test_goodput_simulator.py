"""The simulator of `benchmarks/goodput` against closed forms."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path

import phase_times
import pytest
from failures import DAY, INDEPENDENT, NOTHING_FAILS, FailureRates, Kind, failures
from phase_times import CLUSTER, PhaseTimes
from simulator import Cluster, Measures, Outcome, simulate, young_interval
from table import ladder

FIXED = PhaseTimes(
    "fixed", {"stall": [5.0], "detect": [10.0], "start": [40.0], "load": [20.0], "step": [2.0]}
)
SMALL = Cluster(gpus=1)


def hourly(share: str = "") -> FailureRates:
    """A failure an hour, all of one kind."""
    rates = replace(INDEPENDENT, per_gpu_day=24.0)
    return replace(rates, **{share: 1.0}) if share else rates


@pytest.mark.parametrize("seed", range(5))
def test_categories_sum_to_the_wall_time(seed: int) -> None:
    rates, times = (
        FailureRates(per_gpu_day=8 / 1024, storage_per_day=2.0),
        phase_times.load(CLUSTER),
    )
    for _, _, measures in ladder(times, rates, 1024):
        found = simulate(Cluster(1024, spares=1), rates, times, measures, 30, seed)
        assert sum(found.seconds.values()) == pytest.approx(30 * DAY, rel=1e-9)
        assert min(found.seconds.values()) >= 0.0
        assert all(found.failures[kind] > 0 for kind in Kind)
        assert found.requeues > 0
        assert found.seconds["queue"] > 0


def test_without_failures_only_saves_cost_anything() -> None:
    found = simulate(SMALL, NOTHING_FAILS, FIXED, Measures(interval=95.0), 10, 1)
    assert found.share("stall") == pytest.approx(0.05, rel=1e-3)
    assert found.share("train") + found.share("stall") == pytest.approx(1.0)
    assert found.saves == pytest.approx(10 * DAY / 100, abs=1)


@pytest.mark.parametrize("interval", [120.0, 600.0, 2400.0])
def test_poisson_failures_cost_what_daly_says(interval: float) -> None:
    """Daly, "A higher order estimate of the optimum checkpoint interval", 2006, equation 13."""
    between, restart = 3600.0, 10.0 + 40.0 + 20.0
    cycle = between * math.exp(restart / between) * math.expm1((interval + 5.0) / between)
    found = simulate(SMALL, hourly(), FIXED, Measures(interval), 800, 1)
    assert found.share("train") == pytest.approx(interval / cycle, rel=0.01)
    lost = found.failures[Kind.PROCESS]
    for phase in ("detect", "start", "load"):
        assert found.seconds[phase] / lost == pytest.approx(FIXED.samples[phase][0], rel=0.1)


def test_young_s_interval_is_near_the_best() -> None:
    young = young_interval(5.0, hourly().per_second(1))

    def trained(factor: float) -> float:
        return simulate(SMALL, hourly(), FIXED, Measures(factor * young), 500, 1).share("train")

    assert trained(1.0) > max(trained(0.25), trained(4.0))


def test_a_seed_gives_the_same_again_and_another_does_not() -> None:
    def run(seed: int) -> Outcome:
        slots = Measures(600.0, slots=True, slot_misses=0.5)  # which draws from a stream of its own
        return simulate(SMALL, hourly(), FIXED, slots, 10, seed)

    assert run(1) == run(1)
    assert run(1) != run(2)


def test_the_failures_of_a_seed_are_the_same_whatever_is_done_about_them() -> None:
    rates = replace(hourly(), host_share=0.3, burst_share=0.2, repeat_share=0.2)
    disk = simulate(SMALL, rates, FIXED, Measures(600.0), 30, 3)
    memory = simulate(SMALL, rates, FIXED, Measures(1200.0, slots=True, buddy_steps=4), 30, 3)
    assert disk.failures == memory.failures


def test_memory_costs_the_step_under_way_and_now_and_then_one_more() -> None:
    slots = Measures(600.0, slots=True, slot_misses=0.5)
    found = simulate(SMALL, hourly(), FIXED, slots, 500, 1)
    each = found.seconds["recompute"] / found.failures[Kind.PROCESS]
    assert each == pytest.approx(2.0, rel=0.1)  # of 2 s: half of one, and half the time one more


def test_memory_dies_with_its_host_unless_a_buddy_has_it() -> None:
    hosts = hourly("host_share")
    fleet = replace(SMALL, spares=1000)
    slots = simulate(fleet, hosts, FIXED, Measures(600.0, slots=True), 500, 1)
    disk = simulate(fleet, hosts, FIXED, Measures(600.0), 500, 1)
    buddy = simulate(fleet, hosts, FIXED, Measures(600.0, slots=True, buddy_steps=4), 500, 1)
    assert slots == disk
    each = buddy.seconds["recompute"] / buddy.failures[Kind.HOST]
    assert each == pytest.approx(1.0 + 2.0 * 2.0, rel=0.1)


def test_the_job_waits_in_the_queue_once_no_spare_is_left() -> None:
    times = PhaseTimes("queue", {**FIXED.samples, "queue": [500.0]})
    never = replace(SMALL, spares=3, repair_seconds=1e12)
    found = simulate(never, hourly("host_share"), times, Measures(600.0), 100, 1)
    lost = found.failures[Kind.HOST]
    assert found.requeues == lost // 4  # three spares, and the fourth loss brings three more
    assert found.seconds["queue"] == pytest.approx(500.0 * found.requeues, rel=0.1)


def test_a_bad_node_fails_again_until_it_is_left_out() -> None:
    rates = replace(hourly(), repeat_share=1.0, left_out_after=3)
    found = list(itertools.islice(failures(rates, 1, random.Random(1)), 3000))
    assert [each.at for each in found] == sorted(each.at for each in found)
    assert sum(each.left_out for each in found) == pytest.approx(1000, abs=10)


def test_a_burst_brings_as_many_as_it_says() -> None:
    rates = replace(hourly(), burst_share=0.5, burst_mean=3.0)
    found = list(failures_until(rates, 1000 * 3600.0))
    assert len(found) == pytest.approx(1000 * (1 + 0.5 * 3.0), rel=0.1)


def failures_until(rates: FailureRates, end: float) -> list[float]:
    stream = failures(rates, 1, random.Random(1))
    return list(itertools.takewhile(lambda at: at < end, (each.at for each in stream)))


def test_a_file_may_scale_another(tmp_path: Path) -> None:
    shape = {"about": "shape", "samples": {"start": [1.0, 2.0, 6.0]}}
    (tmp_path / "shape.json").write_text(json.dumps(shape))
    scaled = {"about": "scaled", "shape": "shape.json", "medians": {"warm": ["start", 10.0, "why"]}}
    (tmp_path / "scaled.json").write_text(json.dumps(scaled))
    assert phase_times.load(tmp_path / "scaled.json").samples == {"warm": [5.0, 10.0, 30.0]}
