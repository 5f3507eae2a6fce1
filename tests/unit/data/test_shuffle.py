"""The order is a bijection per epoch, the same one at a time or many, and evenly spread."""

from __future__ import annotations

import pickle
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from kempner.data.order.shuffle import MAX_SAMPLES, SHUFFLE_BELOW, FeistelNetwork, SampleOrder

JUST_ABOVE = SHUFFLE_BELOW + 1
Counts = NDArray[np.int64]
Expected = float | NDArray[np.float64]

KEYS = (3, 1 << 40, 7, 2**64 - 1, 12345678901234567890, 0)


def epoch_of(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    return SampleOrder(n, seed).samples(np.arange(epoch * n, (epoch + 1) * n))


def is_bijection(samples: NDArray[np.int64]) -> bool:
    return np.array_equal(np.sort(samples), np.arange(len(samples)))


def surprise(observed: Counts, expected: Expected, freedom: int) -> float:
    """How many standard deviations a chi-square statistic is from its mean (Wilson-Hilferty)."""
    return _surprise(((observed - expected) ** 2 / expected).sum(), freedom)


def _surprise(statistic: float, freedom: int) -> float:
    spread = 2 / (9 * freedom)
    return float(((statistic / freedom) ** (1 / 3) - (1 - spread)) / spread**0.5)


def epochs_of(n: int, seed: int, count: int) -> NDArray[np.int64]:
    """Samples [count, n] of the first epochs."""
    return np.stack([epoch_of(n, seed, epoch) for epoch in range(count)])


def test_every_size_up_to_2000_is_a_bijection_in_every_epoch() -> None:
    for n in range(1, 2001):
        for epoch in (0, 1000):
            assert is_bijection(epoch_of(n, n, epoch)), (n, epoch)


def test_the_network_alone_is_a_bijection_for_every_small_size() -> None:
    for n in range(1, 2001):
        assert is_bijection(FeistelNetwork.keyed(n, KEYS).permute_many(np.arange(n))), n


@pytest.mark.parametrize(
    "n", [4095, 4096, 4097, 65_535, 65_536, 65_537, 99_991, 250_000, 999_999, 1_000_000]
)
def test_larger_sizes_are_bijections(n: int) -> None:
    assert is_bijection(epoch_of(n, seed=9, epoch=4))


@given(n=st.integers(SHUFFLE_BELOW, 10**6), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=12)
def test_sampled_sizes_are_bijections(n: int, seed: int) -> None:
    assert is_bijection(epoch_of(n, seed, epoch=2))


@given(
    n=st.integers(1, MAX_SAMPLES) | st.integers(1, 2 * SHUFFLE_BELOW),
    seed=st.integers(0, 2**64 - 1),
    start=st.integers(0, 2**60),
)
@settings(max_examples=300)
def test_one_at_a_time_equals_many_at_a_time(n: int, seed: int, start: int) -> None:
    order = SampleOrder(n, seed)
    positions = np.arange(start, start + 9)
    located = [order.locate(position) for position in positions.tolist()]
    assert [epoch for epoch, _ in located] == (positions // n).tolist()
    assert [sample for _, sample in located] == order.samples(positions).tolist()
    assert all(0 <= sample < n for _, sample in located)


@given(n=st.integers(1, 300), keys=st.tuples(*[st.integers(0, 2**64 - 1)] * 6))
@settings(max_examples=100)
def test_the_network_one_at_a_time_equals_many_at_a_time(n: int, keys: tuple[int, ...]) -> None:
    network = FeistelNetwork.keyed(n, keys)
    many = network.permute_many(np.arange(n)).tolist()
    assert [network.permute(index) for index in range(n)] == many


def test_positions_need_not_be_sorted_and_may_span_epochs() -> None:
    order = SampleOrder(10, 3)
    positions = np.array([25, 3, 9, 10, 11, 0])
    assert order.samples(positions).tolist() == [order.locate(p)[1] for p in positions.tolist()]


def test_the_order_never_changes() -> None:
    # These very values are part of every run's checkpoints: they change with PERMUTATION_VERSION.
    assert SampleOrder(7, 5).samples(np.arange(14)).tolist() == [
        2,
        3,
        6,
        0,
        4,
        5,
        1,
        0,
        4,
        2,
        6,
        1,
        3,
        5,
    ]
    assert SampleOrder(10**9, 5).samples(np.arange(5)).tolist() == [
        911252973,
        763152500,
        509771495,
        278354948,
        225552331,
    ]
    assert SampleOrder(10**9, 5).locate(3 * 10**9 + 17) == (3, 317583211)


def test_epochs_and_seeds_differ() -> None:
    for n in (1000, 5000):
        assert not np.array_equal(epoch_of(n, 1, 0), epoch_of(n, 1, 1))
        assert not np.array_equal(epoch_of(n, 1, 0), epoch_of(n, 2, 0))


def test_an_order_travels_to_another_process() -> None:
    order = SampleOrder(5000, 1)
    assert pickle.loads(pickle.dumps(order)).locate(12_345) == order.locate(12_345)


@pytest.mark.parametrize(
    ("n", "seed"), [(0, 0), (-1, 0), (MAX_SAMPLES + 1, 0), (5, -1), (5, 2**64)]
)
def test_impossible_orders_are_refused(n: int, seed: int) -> None:
    with pytest.raises(ValueError, match="2\\*\\*"):
        SampleOrder(n, seed)


def test_negative_positions_are_refused() -> None:
    with pytest.raises(ValueError, match="start at 0, not -1"):
        SampleOrder(5, 0).locate(-1)
    with pytest.raises(ValueError, match="start at 0, not -1"):
        SampleOrder(5, 0).samples(np.array([2, -1]))


@pytest.mark.parametrize("n", [2, 3, 4, 5])
def test_all_permutations_of_a_few_are_equally_likely(n: int) -> None:
    kinds = {kind: number for number, kind in enumerate(permutations(range(n)))}
    seen = [kinds[tuple(row)] for row in epochs_of(n, seed=1, count=6000).tolist()]
    counts = np.bincount(seen, minlength=len(kinds))
    assert abs(surprise(counts, len(seen) / len(kinds), len(kinds) - 1)) < 4


SIZES = pytest.mark.parametrize(
    ("n", "epochs"), [(10, 4000), (100, 2000), (1000, 300), (JUST_ABOVE, 200), (10_000, 100)]
)


@SIZES
def test_every_value_is_as_likely_at_every_position(n: int, epochs: int) -> None:
    """Blocks of positions against blocks of values, at most 64 of each."""
    blocks = min(n, 64)
    block_of = np.arange(n) * blocks // n
    sizes = np.bincount(block_of)
    cells = block_of * blocks + block_of[epochs_of(n, seed=2, count=epochs)]
    counts = np.bincount(cells.ravel(), minlength=blocks**2).reshape(blocks, blocks)
    expected = epochs * np.outer(sizes, sizes) / n
    # The sums of rows and columns are given, hence (blocks - 1)^2 degrees of freedom; drawing
    # without replacement makes the cells vary n / (n - 1) times as much.
    statistic = ((counts - expected) ** 2 / expected).sum() * (n - 1) / n
    assert abs(_surprise(statistic, (blocks - 1) ** 2)) < 4


@SIZES
@pytest.mark.parametrize("apart", [1, 2, 7])
def test_neighbours_are_unrelated(n: int, epochs: int, apart: int) -> None:
    """The distances, around the circle, between the values at positions that are `apart`."""
    first = np.arange(0, n - apart, 4 * apart) if n > 100 else np.array([0])
    samples = epochs_of(n, seed=3, count=epochs)
    distances = (samples[:, first + apart] - samples[:, first]) % n
    _check_even(distances - 1, n - 1)


@SIZES
def test_one_epoch_says_nothing_about_the_next(n: int, epochs: int) -> None:
    samples = epochs_of(n, seed=4, count=epochs)
    moved = (samples[1::2] - samples[::2]) % n
    _check_even(moved if n > 100 else moved[:, 0], n)


def _check_even(values: NDArray[np.int64], n: int) -> None:
    """Whether values of [0, n) are all as likely, in at most 500 bins."""
    bins = min(n, 500)
    observed = np.bincount((values * bins // n).ravel(), minlength=bins)
    expected = observed.sum() * np.bincount(np.arange(n) * bins // n) / n
    assert abs(surprise(observed, expected, bins - 1)) < 4


def test_the_measure_notices_a_bias() -> None:
    fair = np.random.default_rng(0).multinomial(10_000, [0.1] * 10)
    assert abs(surprise(fair, 1000, 9)) < 4
    assert surprise(np.array([1150, 850] * 5), 1000, 9) > 4
