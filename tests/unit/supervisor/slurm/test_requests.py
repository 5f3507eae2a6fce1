"""What kempner asks of the controller, which serves the whole cluster: counted over an hour of one
job, and of 200 jobs that begin in the same second; its nodes and the reservations included. The
watchdog asks nothing while its supervisor lives."""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest
from harness import Clock

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmSilentError
from kempner.cluster.slurm.hostlist import expand_hosts
from kempner.cluster.slurm.job import job_fields, parse_job
from kempner.supervisor.slurm import job_monitor, job_nodes
from kempner.supervisor.slurm.job_monitor import JobMonitor

JOBS = json.loads((Path(__file__).parents[2] / "cluster" / "slurm_data" / "jobs.json").read_text())
HOUR, DAY = 3600.0, 86400.0
EPOCH = 1_795_000_000.0
NODES = expand_hosts(parse_job(job_fields(JOBS["running"])).nodes.held)
ANSWERED_IN = 0.01
"""Seconds for one answer of a controller that gives one after the other."""


class FakeController:
    """Answers, and counts what it is asked, by the first words of the question."""

    def __init__(self, clock: Clock, ends_in: float) -> None:
        self._clock, self._end = clock, EPOCH + clock.now + ends_in
        self.asked: Counter[str] = Counter()
        self.busy_until = self.longest_wait = 0.0

    def ask(self, command: list[str], read: Callable[[str], object]) -> object:
        self.asked[" ".join(command[:3])] += 1
        begin = max(self._clock.monotonic(), self.busy_until)
        self.busy_until = begin + ANSWERED_IN
        self.longest_wait = max(self.longest_wait, self.busy_until - self._clock.monotonic())
        if (found := read(self._answer(command[2]))) is None:
            raise SlurmSilentError("cut off")
        return found

    def _answer(self, what: str) -> str:
        if what == "config":
            now = datetime.fromtimestamp(EPOCH + self._clock.now, UTC).strftime("%Y-%m-%dT%H:%M:%S")
            settings = "KillWait = 30 sec\nSlurmdTimeout = 300 sec\nSLURM_VERSION = 26.05.5\n"
            return f"Configuration data as of {now}\n{settings}"
        if what == "node":
            return "".join(f"NodeName={name} State=MIXED Reason=none\n" for name in NODES)
        if what == "reservation":
            return "No reservations in the system\n"
        if what == "partition":
            return "PartitionName=low PreemptMode=REQUEUE GraceTime=20\n"
        end = datetime.fromtimestamp(self._end, UTC).strftime("%Y-%m-%dT%H:%M:%S")
        words = (
            f"EndTime={end}" if w.startswith("EndTime=") else w for w in JOBS["running"].split(" ")
        )
        return " ".join(words) + "\n"


def follow(
    jobs: int, hours: float, ends_in: float, monkeypatch: pytest.MonkeyPatch
) -> FakeController:
    """The supervisors of `jobs` jobs that begin at once, each of which looks when it wants to."""
    clock = Clock()
    controller = FakeController(clock, ends_in)
    for module in (job_monitor, job_nodes, scontrol):
        monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(scontrol, "ask", controller.ask)
    begin = clock.monotonic()
    monitors = [JobMonitor(str(number), batch=True) for number in range(jobs)]
    due, job_due = [(begin, number) for number in range(jobs)], dict.fromkeys(range(jobs), begin)
    for monitor in monitors:
        monitor._post = lambda seen: None  # instead of its thread
    while due and due[0][0] < begin + hours * HOUR:
        at, number = heapq.heappop(due)
        clock.now, monitor = at, monitors[number]
        if at >= job_due[number]:
            assert monitor._look_once()
            job_due[number] = at + monitor.next_look()
        if at >= monitor.nodes.due:
            monitor._look_at_nodes()
        heapq.heappush(due, (min(job_due[number], monitor.nodes.due), number))
    return controller


def test_a_job_asks_less_than_260_questions_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = follow(1, 1.0, DAY, monkeypatch).asked
    print(dict(asked))
    assert asked["scontrol show job"] <= HOUR / (3 * job_monitor.LOOK_EVERY) + 1
    assert asked["scontrol show node"] + asked["scontrol show reservation"] <= HOUR / 30 + 6
    assert asked["scontrol show reservation"] == HOUR / job_nodes.MAINTENANCE_EVERY
    assert asked["scontrol show config"] <= HOUR / job_monitor.SETTINGS_EVERY + 1
    assert asked["scontrol show partition"] == 1
    assert sum(asked.values()) < 260


def test_near_its_end_a_job_is_looked_at_more_often(monkeypatch: pytest.MonkeyPatch) -> None:
    last = follow(1, job_monitor.FAR_FROM_END / HOUR, job_monitor.FAR_FROM_END, monkeypatch).asked
    assert last["scontrol show job"] == pytest.approx(job_monitor.FAR_FROM_END / 10.0, abs=2)


def test_200_supervisors_leave_a_controller_to_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    controller = follow(200, 0.1, DAY, monkeypatch)
    busy = sum(controller.asked.values()) * ANSWERED_IN / (0.1 * HOUR)
    print(dict(controller.asked), f"{busy:.1%}", f"{controller.longest_wait:.1f} s")
    assert busy < 0.15
    assert controller.longest_wait < job_monitor.LOOK_EVERY
