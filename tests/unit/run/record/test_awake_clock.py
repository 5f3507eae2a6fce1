"""The clock that stands still while its process is suspended."""

from __future__ import annotations

import pytest

from kempner.run.control.client import BEAT
from kempner.run.link.client import RETRY
from kempner.run.process import threads
from kempner.run.process.threads import LONGEST_NAP, AwakeClock
from kempner.supervisor.attempt import EXIT_GRACE, LOOK
from kempner.supervisor.control.rank_connections import RECONNECT


class Monotonic:
    """Stands for the module `time`."""

    def __init__(self) -> None:
        self.at = 1000.0

    def monotonic(self) -> float:
        return self.at


@pytest.mark.parametrize(
    ("naps", "seconds"),
    [
        ([], 0.0),
        ([0.0], 0.0),
        ([0.5, 0.5, 1.0], 2.0),
        ([LONGEST_NAP], LONGEST_NAP),
        ([3600.0], LONGEST_NAP),
        ([1.0, 3600.0, 1.0], 2.0 + LONGEST_NAP),
        ([1.0] * 3600, 3600.0),
    ],
)
def test_it_counts_the_time_between_looks_up_to_a_nap(
    naps: list[float], seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Monotonic()
    monkeypatch.setattr(threads, "time", time)
    awake = AwakeClock()
    for nap in naps:
        time.at += nap
        awake.now()
    assert awake.now() == seconds


@pytest.mark.parametrize(
    ("naps", "seconds", "stood_still"),
    [
        ([LONGEST_NAP, 1.0], 3600.0, False),
        ([3600.0], 1.0, True),
        ([3600.0, 1.0], 1.5, True),
        ([3600.0, 1.0, 1.0], 1.5, False),
    ],
)
def test_it_knows_whether_it_stood_still_meanwhile(
    naps: list[float], seconds: float, stood_still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    time = Monotonic()
    monkeypatch.setattr(threads, "time", time)
    awake = AwakeClock()
    for nap in naps[:-1]:
        time.at += nap
        awake.now()
    time.at += naps[-1]
    assert awake.stood_still(seconds) is stood_still


def test_a_nap_is_longer_than_every_loop_waits_and_shorter_than_every_deadline() -> None:
    assert max(LOOK, BEAT, *RETRY) < LONGEST_NAP < min(RECONNECT, EXIT_GRACE)
