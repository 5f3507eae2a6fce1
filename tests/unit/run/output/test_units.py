"""Numbers in units that fit."""

from __future__ import annotations

import pytest

from kempner.run.output.units import count, flops_text, seconds_text, size_text


@pytest.mark.parametrize(
    ("size", "words"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (42_000, "42.0 kB"),
        (3_250_000, "3.2 MB"),
        (56.3e9, "56.3 GB"),
        (3178.7e9, "3.2 TB"),
        (4.2e18, "4,200,000.0 TB"),
    ],
)
def test_a_size_is_never_rounded_to_nothing(size: float, words: str) -> None:
    assert size_text(size) == words


def test_seconds_and_operations_of_small_models() -> None:
    assert [seconds_text(s) for s in (0, 1.5e-6, 0.0123, 0.999, 14.08, 7200)] == [
        *("0 us", "1.5 us", "12.3 ms", "999 ms", "14.1 s", "7,200 s"),
    ]
    assert [flops_text(f) for f in (0, 4.2e6, 7e9, 6181e12)] == [
        *("0 MFLOP", "4 MFLOP", "7 GFLOP", "6,181 TFLOP"),
    ]


def test_a_noun_agrees_with_its_number() -> None:
    assert [count(n, "rank") for n in (0, 1, 1024)] == ["0 ranks", "1 rank", "1,024 ranks"]
    assert count(2, "loss", "losses") == "2 losses"
