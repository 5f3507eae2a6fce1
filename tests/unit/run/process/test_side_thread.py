"""What is slow is done beside, and left to itself once there is a reason to stop."""

from __future__ import annotations

import threading

import pytest

from kempner.run.process.threads import unless


def test_the_result_or_the_error_of_the_work_comes_back() -> None:
    assert unless(lambda: False, lambda: 7, "work") == 7
    with pytest.raises(KeyError, match="lost"):
        unless(lambda: False, lambda: {}["lost"], "work")


def test_a_stop_is_not_kept_waiting() -> None:
    hold, begun = threading.Event(), threading.Event()

    def work() -> int:
        begun.set()
        hold.wait()
        return 7

    assert unless(begun.is_set, work, "work") is None
    hold.set()
