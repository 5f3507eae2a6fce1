"""What was really run on which Slurm: a line of JSON for each test that had the cluster."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lengths import commit
from versions import root_of, told_version

OUTCOMES = ("passed", "skipped", "failed")


class Record:
    """A plugin that adds a line after each test."""

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
        if "cluster" in getattr(item, "fixturenames", ()) and self._outcome != "skipped":
            version = item.config.getoption("--slurm")
            self._add(item, told_version(root_of(version) if version else None))
        return done

    def _add(self, item: pytest.Item, version: str) -> None:
        line = {
            "slurm": version,
            "test": item.nodeid,
            "outcome": self._outcome,
            "commit": commit(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "machine": machine(),
            "command": command(item.config),
        }
        with open(self.file, "a") as out:  # one short write: workers do not mix their lines
            out.write(json.dumps(line) + "\n")


def machine() -> str:
    """Its kind, without its name."""
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    system = platform.freedesktop_os_release()["PRETTY_NAME"]
    kind = f"{os.cpu_count()} cores, {memory:.0f} GiB, {platform.machine()}"
    return f"{kind}, {system}, Python {platform.python_version()}"


def command(config: pytest.Config) -> str:
    """As it was called, but for the place of the record; a worker knows that of its session."""
    words = getattr(config, "workerinput", {}).get("mainargv", sys.argv)
    return shlex.join(["pytest", *words[1:]]).replace(
        str(config.getoption("--slurm-record")), "FILE"
    )
