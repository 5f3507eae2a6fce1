"""The real cluster as a fixture; `lab.py` says how to use it."""

from __future__ import annotations

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import warm
from harness import Run
from lab import Cluster, missing
from neighbours import Neighbours
from recording import Record
from submitting import LONG, Project
from versions import told_version, why_no_root

HERE = Path(__file__).parent

LONG_FIRST = ("stops", "faults", "jobs", "network")
"""These folders in this order: a long test that begins last would be waited for alone."""


def pytest_addoption(parser: pytest.Parser) -> None:
    told = "run the tests marked as every_slurm on this version, one of versions.py"
    parser.addoption("--slurm", default="", help=told)
    parser.addoption("--slurm-record", type=Path, help="add a line of JSON for each test to a file")


def pytest_configure(config: pytest.Config) -> None:
    if record := config.getoption("--slurm-record", None):
        config.pluginmanager.register(Record(record), "slurm-record")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Sort the tests of the folders here; others stay where they are."""
    if config.getoption("--slurm", ""):
        left_out = [item for item in items if not item.get_closest_marker("every_slurm")]
        items[:] = [item for item in items if item.get_closest_marker("every_slurm")]
        config.hook.pytest_deselected(items=left_out)
    places = [place for place, item in enumerate(items) if HERE in item.path.parents]
    ours = [items[place] for place in places]
    ours.sort(key=lambda item: LONG_FIRST.index(item.path.parent.name))
    for place, item in zip(places, ours, strict=True):
        items[place] = item


@pytest.fixture(scope="session")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Cluster]:
    """A real Slurm cluster of eight nodes, up once per session.

    Where there can be none, the test is skipped; with KEMPNER_REQUIRE_SLURM=1 it fails.
    """
    version = pytestconfig.getoption("--slurm", "")
    if reason := missing() or (version and why_no_root(version)):
        if os.environ.get("KEMPNER_REQUIRE_SLURM") == "1":
            pytest.fail(f"KEMPNER_REQUIRE_SLURM=1, but {reason}")
        pytest.skip(reason)
    # Its name must be unique on the machine: the nodes' control groups carry it.
    folder = Path(tempfile.mkdtemp(prefix="lab-", dir=tmp_path_factory.getbasetemp()))
    cluster = Cluster(folder, version=version)
    try:
        with warm.dear():
            cluster.up()
        if version and not (found := told_version(cluster.root)).startswith(version):
            warnings.warn(f"Debian has Slurm {found} now in the place of {version}", stacklevel=1)
        yield cluster
    finally:
        cluster.down()


@pytest.fixture
def project(cluster: Cluster, tmp_path: Path, corpus: Path) -> Project:
    """The project's scripts in a folder that all nodes share, and a tiny run."""
    return Project.make(cluster, tmp_path / "project", corpus)


@pytest.fixture
def neighbours(cluster: Cluster, tmp_path: Path) -> Iterator[Neighbours]:
    """Others who wait for nodes once they `arrive`: none of their jobs may fail by our doing."""
    others = Neighbours(cluster, tmp_path)
    yield others
    others.leave()


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
