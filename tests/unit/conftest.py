"""What the tests of the control channel share."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from callers import Supervisor

from kempner.run.control import client as link_module
from kempner.supervisor.control import server as channel_module


@pytest.fixture
def supervisor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    monkeypatch.setattr(channel_module, "TICK", 0.1)
    supervisor = Supervisor(tmp_path)
    yield supervisor
    monkeypatch.setattr(link_module, "LAST_WORDS", 0.0)
    supervisor.close()
