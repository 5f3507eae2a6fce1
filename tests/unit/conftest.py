"""What the unit tests share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from callers import Supervisor

from kempner.run.control import client as link_module
from kempner.run.link import server as channel_module
from kempner.run.output import writers
from kempner.run.process import retry
from kempner.run.process.retry import StorageWaits


@pytest.fixture(autouse=True)
def nothing_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other tests have waited for is not known to this one."""
    monkeypatch.setattr(retry, "_waits", StorageWaits())


@pytest.fixture(autouse=True)
def all_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is told is there at once, also on a machine that is busy for half a second."""
    monkeypatch.setattr(writers, "PATIENCE", 60.0)


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(channel_module, "TICK", 0.1)
    supervisor = Supervisor(tmp_path)
    yield supervisor
    monkeypatch.setattr(link_module, "LAST_WORDS", 0.0)
    supervisor.close()


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> StorageWaits:
    """This process waits for storage, as a rank does."""
    monkeypatch.setattr(retry, "FIRST_PAUSE", 0.001)
    monkeypatch.setattr(retry, "_waits", waits := StorageWaits())
    waits.configure(patience=60.0)
    return waits
