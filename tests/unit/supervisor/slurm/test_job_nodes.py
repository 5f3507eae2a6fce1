"""The job's own nodes, as Slurm shows them from look to look, and what it is asked meanwhile."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from harness import Clock

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmRefusedError, SlurmSilentError
from kempner.cluster.slurm.job import JobNodes, JobState, JobTimes, job_fields, parse_job
from kempner.cluster.slurm.scontrol import NodeShown, Reservation
from kempner.run.record.events import NodesGivenBack
from kempner.supervisor.slurm import job_monitor, job_nodes
from kempner.supervisor.slurm.job_nodes import NODES_EVERY, NodesWatch

DATA = Path(__file__).parents[2] / "cluster" / "slurm_data" / "jobs.json"
RUNNING = parse_job(job_fields(json.loads(DATA.read_text())["running"]))
JOB = replace(RUNNING, nodes=JobNodes(held="node[1-3]", count=3), times=JobTimes())
HOUR = 3600.0


class Controller:
    """Has three nodes, of which it shows what `states` says; keeps what it was asked."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.states = dict.fromkeys(("node1", "node2", "node3"), "MIXED")
        self.planned: list[Reservation] = []
        self.asked: list[str] = []
        self.kept: list[Sequence[str]] = []
        patch.setattr(scontrol, "shown_nodes", self.show)
        patch.setattr(scontrol, "reservations", self.reservations)
        patch.setattr(scontrol, "ping_nodes", lambda job: self.asked.append("try"))
        patch.setattr(scontrol, "job_state", self.job)
        patch.setattr(scontrol, "keep_nodes", lambda job, nodes: self.kept.append(nodes))

    def show(self, nodes: Sequence[str], within: float) -> list[NodeShown]:
        self.asked.append("nodes")
        return [NodeShown(node, self.states[node]) for node in nodes]

    def reservations(self, within: float) -> list[Reservation]:
        self.asked.append("reservations")
        return self.planned

    def job(self, job: str, within: float = 0.0) -> JobState:
        self.asked.append("job")
        return JOB


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(job_nodes, "time", clock)
    return clock


@pytest.fixture
def controller(monkeypatch: pytest.MonkeyPatch) -> Controller:
    return Controller(monkeypatch)


def look_for(nodes: NodesWatch, clock: Clock, seconds: float) -> None:
    """As the thread does that watches the job."""
    end = clock.now + seconds
    while max(nodes.due, clock.now) < end:
        clock.now = max(clock.now, nodes.due)
        nodes.look(JOB, time.time())
    clock.now = end


def test_no_more_is_asked_of_the_controller_than_the_job_alone_was(
    clock: Clock, controller: Controller
) -> None:
    """Once in twelve seconds, in its last hour too. Every tenth minute a look at the reservations
    comes in between."""
    look_for(NodesWatch("7", batch=True), clock, HOUR)
    near, far = job_monitor.FAR_FROM_END, HOUR - job_monitor.FAR_FROM_END
    jobs = near / job_monitor.LOOK_EVERY + far / (3 * job_monitor.LOOK_EVERY)
    assert jobs + controller.asked.count("nodes") <= HOUR / 12
    assert controller.asked.count("reservations") == 6
    assert set(controller.asked) == {"nodes", "reservations"}


def test_a_node_that_slurm_believes_to_be_there_is_kept_and_the_controller_is_made_to_look(
    clock: Clock, controller: Controller
) -> None:
    nodes = NodesWatch("7", batch=True)
    nodes.leave(["node2"])
    look_for(nodes, clock, 10.0)
    assert (controller.asked[0], controller.kept, nodes.given_back()) == ("try", [], [])
    controller.states["node2"] = "MIXED+NOT_RESPONDING"
    look_for(nodes, clock, 5.0)
    assert controller.kept == [["node1", "node3"]]
    told = NodesGivenBack(("node2",), "node2: Slurm shows it as not responding")
    assert (nodes.given_back(), nodes.given_back()) == ([told], [])
    nodes.wait_for_return(["node2"], within=0.0)


def test_a_controller_that_refuses_to_look_is_asked_all_the_same(
    clock: Clock, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: str) -> None:
        raise SlurmRefusedError(f"scancel {job}", "Access/permission denied")

    monkeypatch.setattr(scontrol, "ping_nodes", refuse)
    nodes = NodesWatch("7", batch=True)
    nodes.leave(["node2"])
    controller.states["node2"] = "DOWN"
    look_for(nodes, clock, 3.0)
    assert controller.kept == [["node1", "node3"]]


def test_for_a_node_that_stays_well_the_controller_is_not_pestered(
    clock: Clock, controller: Controller
) -> None:
    """One on which a process cannot be killed, say."""
    nodes = NodesWatch("7", batch=True)
    nodes.leave(["node2"])
    look_for(nodes, clock, HOUR)
    assert controller.asked.count("try") == 3
    assert controller.asked.count("nodes") <= HOUR / NODES_EVERY + 15
    assert controller.kept == []


@pytest.mark.parametrize(("left", "batch"), [((), True), (("node2",), False)])
def test_nothing_is_resized_for_nothing_nor_in_an_allocation_of_a_user(
    clock: Clock, controller: Controller, left: tuple[str, ...], batch: bool
) -> None:
    nodes = NodesWatch("7", batch)
    nodes.leave(left)
    controller.states["node2"] = "DOWN"
    look_for(nodes, clock, 100.0)
    assert (controller.kept, "try" in controller.asked) == ([], False)


def test_a_node_that_slurm_has_taken_by_itself_is_not_given_back_again(
    clock: Clock, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    smaller = replace(JOB, nodes=JobNodes(held="node[1,3]", count=2))
    monkeypatch.setattr(scontrol, "job_state", lambda job, within: smaller)
    nodes = NodesWatch("7", batch=True)
    nodes.leave(["node2"])
    controller.states["node2"] = "DOWN"
    look_for(nodes, clock, 5.0)
    assert (controller.kept, nodes.given_back()) == ([], [])


def test_what_drains_or_is_to_be_mended_goes_and_what_was_left_does_not_go_again(
    clock: Clock, controller: Controller
) -> None:
    nodes, now = NodesWatch("7", batch=True), time.time()
    controller.states["node2"] = "MIXED+DRAIN"
    controller.planned = [Reservation("lift", now + 300, now + 900, "node3", maintenance=True)]
    look_for(nodes, clock, NODES_EVERY + 10)
    assert nodes.departing["node2"] == "it drains"
    assert nodes.departing["node3"].startswith("its maintenance lift begins in ")
    nodes.leave(["node2"])
    look_for(nodes, clock, 3.0)
    assert list(nodes.departing) == ["node3"]
    assert controller.kept == [["node1", "node3"]]


def test_a_look_without_an_answer_changes_nothing_that_is_known(
    clock: Clock, controller: Controller, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = NodesWatch("7", batch=True)
    controller.states["node2"] = "MIXED+DRAIN"
    look_for(nodes, clock, NODES_EVERY + 10)

    def silent(nodes: Sequence[str], within: float) -> list[NodeShown]:
        raise SlurmSilentError("no answer")

    monkeypatch.setattr(scontrol, "shown_nodes", silent)
    clock.now = nodes.due
    with pytest.raises(SlurmSilentError):
        nodes.look(JOB, time.time())
    assert nodes.departing == {"node2": "it drains"}
    assert nodes.due > clock.now
