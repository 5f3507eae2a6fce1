"""What was really run on which Slurm: a row for each test that had one."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import records
from drilling import proved_by
from versions import root_of, told_version

OUTCOMES = ("passed", "skipped", "failed")


class Record:
    """A plugin that adds a row after each test."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._outcome = ""

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self) -> Iterator[Any]:
        report = yield
        self._outcome = max(self._outcome, report.outcome, key=OUTCOMES.index)
        return report

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        self._outcome = OUTCOMES[0]
        done = yield
        # One of the tests for every Slurm brings up a cluster of its own.
        theirs = "cluster" in getattr(item, "fixturenames", ()) or item.get_closest_marker(
            "every_slurm"
        )
        if theirs and self._outcome != "skipped":
            self._add(item, item.config.getoption("--slurm"))
        return done

    def _add(self, item: pytest.Item, asked: str) -> None:
        version = told_version(root_of(asked) if asked else None)
        command = shlex.join(["pytest", *([f"--slurm={asked}"] if asked else []), item.nodeid])
        row = {"slurm": version, "test": item.nodeid, "outcome": self._outcome}
        told = records.header(proved_by(item.nodeid), command)
        records.write(self.file, [row | told], by=("slurm", "test"))
