"""While a fault strikes, others use the cluster, too, and none of their jobs may fail by it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from lab import Cluster
from neighbours import Neighbours
from submitting import Project


@pytest.fixture(autouse=True)
def _others(request: pytest.FixtureRequest) -> Iterator[None]:
    """They come with the project's first job, but for tests that have `neighbours` of their own,
    and those marked as `alone`, which say why."""
    own = "neighbours" in request.fixturenames or request.node.get_closest_marker("alone")
    if own or "project" not in request.fixturenames:
        yield
        return
    cluster: Cluster = request.getfixturevalue("cluster")
    project: Project = request.getfixturevalue("project")
    folder: Path = request.getfixturevalue("tmp_path")
    project.neighbours = Neighbours(cluster, folder)
    yield
    project.neighbours.go()
