"""The real cluster as a fixture; `lab.py` says how to use it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from harness import Run
from lab import Cluster, missing
from submitting import LONG, Project

HERE = Path(__file__).parent

LONG_FIRST = ("stops", "faults", "jobs", "network")
"""These folders in this order: a long test that begins last would be waited for alone."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests of the folders here; others stay where they are."""
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[place] for place in places]
    ours.sort(key=lambda item: LONG_FIRST.index(item.path.parent.name))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A real Slurm cluster of eight nodes, up once per session.

    Where there can be none, the test is skipped; with KEMPNER_REQUIRE_SLURM=1 it fails.
    """
    if reason := missing():
        if os.environ.get("KEMPNER_REQUIRE_SLURM") == "1":
            pytest.fail(f"KEMPNER_REQUIRE_SLURM=1, but {reason}")
        pytest.skip(reason)
    # Its name must be unique on the machine: the nodes' control groups carry it.
    cluster = Cluster(Path(tempfile.mkdtemp(prefix="lab-", dir=tmp_path_factory.getbasetemp())))
    try:
        with warm.dear():
            cluster.up()
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path, corpus: Path) -> Project:
    """The project's scripts in a folder that all nodes share, and a tiny run."""
    return Project.make(cluster, tmp_path / "project", corpus)


@pytest.fixture(scope="session")
def undisturbed(undisturbed: Callable[..., Run]) -> Run:
    """The tiny run that is `LONG`, over two ranks, to its end."""
    return undisturbed(2, *LONG)


@pytest.fixture(autouse=True)
def _restore(request: pytest.FixtureRequest) -> Iterator[None]:
    """After a test that used the cluster, end its jobs and mend its faults."""
    yield
    if "cluster" in request.fixturenames:
        request.getfixturevalue("cluster").restore()
