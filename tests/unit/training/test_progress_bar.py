"""The line that shows progress: what fits into a terminal, and how long the rest takes."""

from __future__ import annotations

import pytest

from kempner.training.observe.progress_bar import BarRow, BarState, TimeLeft, arrange, describe_time

PLACE = BarState(47, 600, loss=2.6476, speed=11129.4, left=107.0)


@pytest.mark.parametrize(
    ("columns", "row"),
    [
        (80, BarRow("step 47/600", 27, "loss 2.6476 11,129 tokens/s ETA 0:01:47")),
        (60, BarRow("step 47/600", 0, "loss 2.6476 11,129 tokens/s ETA 0:01:47")),
        (49, BarRow("step 47/600", 12, "loss 2.6476 ETA 0:01:47")),
        (40, BarRow("step 47/600", 0, "loss 2.6476 ETA 0:01:47")),
        (30, BarRow("step 47/600", 0, "ETA 0:01:47")),
        (10, BarRow("step 47/600", 0, "")),
    ],
)
def test_step_and_time_to_go_are_kept_the_longest(columns: int, row: BarRow) -> None:
    assert arrange(PLACE, columns) == row


@pytest.mark.parametrize("columns", range(24, 160))
def test_no_line_is_wider_than_the_terminal(columns: int) -> None:
    row = arrange(PLACE, columns)
    assert len(row.before) + 1 + len(row.after) + (row.bar + 1 if row.bar else 0) < columns


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0.4, "0:00:00"),
        (107, "0:01:47"),
        (6096, "1:41:36"),
        (86399, "23:59:59"),
        (97200, "1 d 3 h"),
    ],
)
def test_times(seconds: float, words: str) -> None:
    assert describe_time(seconds) == words


def test_the_pace_is_that_of_the_last_steps() -> None:
    pace = TimeLeft(1000)
    assert pace.left(11, now=60.0) is None
    assert pace.left(12, now=62.0) == 2.0 * 988
    assert pace.left(1000, now=63.0) == 0.0
    assert pace.left(5, now=64.0) is None  # after a rollback
    assert pace.left(7, now=65.0) == 0.5 * 993
    assert pace.left(8, now=10_000.0) is None  # after a pause
