"""What the tests of the doctor share."""

from __future__ import annotations

from pathlib import Path

import pytest
from sick_site import Site


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)
