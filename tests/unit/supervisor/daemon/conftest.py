"""An attempt to follow, and its clock."""

from __future__ import annotations

from pathlib import Path

import pytest
from following import Hands, follow
from harness import Clock

from kempner.config.resilience import ResilienceSection
from kempner.config.sections import Config, SuperviseSection
from kempner.run.process import threads as awake
from kempner.run.record.ledger import Ledger
from kempner.supervisor.attempt import AttemptFollower


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake, "time", clock)
    return clock


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def follower(hands: Hands, tmp_path: Path, clock: Clock) -> AttemptFollower:
    config = Config(
        supervise=SuperviseSection(stop_grace=60.0, crash_grace=5.0),
        resilience=ResilienceSection(hang_timeout_max=1000.0),
    )
    ledger = Ledger(tmp_path / "ledger.jsonl")
    return follow(hands, 3, config, ledger)
