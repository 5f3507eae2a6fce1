"""What each test costs, as a line of JSON each: KEMPNER_TEST_COSTS=FILE make check.

Its seconds, the CPU seconds of this process and of all below it, dead or alive (also the nodes of
the lab's cluster), and how many ranks were started. Fixtures count for the test that needed them
first.

As root, on a machine with the older kind of control groups, the kernel counts the CPU seconds.
Elsewhere those of a process are missing that ended after its parent: of fork servers and ranks,
which are most of a test of whole runs.
"""

from __future__ import annotations

import json
import os
import resource
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

ASKED = os.environ.get("KEMPNER_TEST_COSTS")
CPU_GROUPS = Path("/sys/fs/cgroup/cpuacct")
TICK = os.sysconf("SC_CLK_TCK")


def watch(config: pytest.Config) -> None:
    """Write down what tests cost, if that is asked for."""
    if ASKED and not config.pluginmanager.has_plugin("costs"):
        config.pluginmanager.register(Costs(Path(ASKED)), "costs")


class Costs:
    """A plugin that looks before and after each test."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.counted = CPU_GROUPS / f"pytest-{os.getpid()}"
        """A group that holds this process, and so what that starts."""
        with suppress(OSError):
            self.counted.mkdir()
            (self.counted / "cgroup.procs").write_text(str(os.getpid()))
        self.cpu_seconds = cpu_seconds
        if (usage := self.counted / "cpuacct.usage").exists():
            self.cpu_seconds = lambda: int(usage.read_text()) / 1e9

    def pytest_unconfigure(self) -> None:
        """Leave the group; an empty one stays where the template still ran, and does no harm."""
        with suppress(OSError):
            (CPU_GROUPS / "cgroup.procs").write_text(str(os.getpid()))
            self.counted.rmdir()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[Any]:
        base = item.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]
        began, cpu, ranks = time.monotonic(), self.cpu_seconds(), ranks_started(base)
        outcome = yield
        line = {
            "test": item.nodeid,
            "seconds": round(time.monotonic() - began, 2),
            "cpu": round(self.cpu_seconds() - cpu, 2),
            "ranks": ranks_started(base) - ranks,
        }
        with open(self.file, "a") as out:  # one short write: workers do not mix their lines
            out.write(json.dumps(line) + "\n")
        return outcome


def ranks_started(base: Path) -> int:
    """How many ranks have left a log in a run below this folder."""
    logs = base.rglob("attempts/*/rank-*.jsonl")
    found = set()
    with suppress(OSError):  # storage of a test may still refuse
        for log in logs:
            # A copy of a run has its logs with their times, and counts once.
            found.add((log.parent.name, log.name, log.stat().st_mtime_ns))
    return len(found)


def cpu_seconds() -> float:
    """CPU time of this process and of every process below it, ended ones too."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        used = resource.getrusage(who)
        total += used.ru_utime + used.ru_stime
    return total + sum(used for _, used in below(os.getpid()))


def below(pid: int) -> Iterator[tuple[int, float]]:
    """Each living descendant, with its CPU seconds and those of the children it has waited for."""
    children: dict[int, list[tuple[int, float]]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it ended while we looked
                continue
            used = sum(map(int, fields[11:15])) / TICK
            children.setdefault(int(fields[1]), []).append((int(entry.name), used))
    waiting = [pid]
    while waiting:
        for child in children.get(waiting.pop(), ()):
            yield child
            waiting.append(child[0])
