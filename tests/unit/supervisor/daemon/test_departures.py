"""The ranks stop for a node that is to go, and start where they can: here, or after a requeue."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from following import Hands, follow_a_rank_that_trains

from kempner.cluster.slurm.allocation import Allocation
from kempner.run.control.protocol import Stop
from kempner.run.process.exit_codes import StopReason
from kempner.run.record.attempts import Attempt
from kempner.run.record.events import NodesGivenBack
from kempner.run.record.ledger import Ledger, read_lines
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.context import Departures
from kempner.supervisor.launchers.base import CannotRestart

ATTEMPT = Attempt(4, "abcd")
DRAINS = "it drains (its fan is loud)"


class Job:
    """Of three nodes, node1 the supervisor's, of which some are going."""

    def __init__(self, *going: str, comes_back: bool = True) -> None:
        self.nodes, self.comes_back = self, comes_back
        self.departing = dict.fromkeys(going, DRAINS)
        self.given: list[NodesGivenBack] = []
        self.left: list[str] = []

    def given_back(self) -> list[NodesGivenBack]:
        told, self.given = self.given, []
        return told

    def leave(self, nodes: tuple[str, ...], within: float = 0.0) -> None:
        self.left += nodes


class Nodes:
    """A launcher with ranks on node1 and node2."""

    all = ("node1", "node2", "node3")
    allocation = Allocation("7", ("node1", "node2"), 1, None, 0, batch=True)

    def __init__(self, spare: bool) -> None:
        self.spare, self.left_out, self.nodes = spare, list[str](), self

    def unavoidable(self, nodes: list[str]) -> list[str]:
        return [node for node in nodes if node in self.allocation.nodes and not self.spare]

    def leave_out(self, nodes: tuple[str, ...]) -> None:
        self.left_out += nodes


@pytest.fixture
def follower(hands: Hands, tmp_path: Path) -> AttemptFollower:
    return follow_a_rank_that_trains(hands, Ledger(tmp_path / "ledger.jsonl"))


def departures(
    folder: Path, job: Job, monkeypatch: pytest.MonkeyPatch, spare: bool = True
) -> tuple[Departures, Nodes]:
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    nodes: Any = Nodes(spare)
    the_job: Any = job
    return Departures(nodes, the_job, Ledger(folder / "ledger.jsonl"), 60.0), nodes


def lines(folder: Path, name: str) -> list[dict[str, Any]]:
    return [line for line in read_lines(folder / "ledger.jsonl") if line["event"] == name]


@pytest.mark.parametrize("spare", [True, False])
def test_the_ranks_are_asked_once_and_leave_the_node(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hands: Hands,
    follower: AttemptFollower,
    spare: bool,
) -> None:
    job = Job("node2")
    found, nodes = departures(tmp_path, job, monkeypatch, spare)
    why = f"node2 is to go: {DRAINS}"
    for _ in range(3):
        found.consider(follower)
    assert hands.told == [Stop(StopReason.NODE_LEAVES, why, 60.0)]
    assert nodes.left_out == job.left == []  # until they have left
    unable = found.leave(ATTEMPT, None)
    assert unable == (None if spare else CannotRestart(why, ("node2",)))
    assert nodes.left_out == job.left == (["node2"] if spare else [])
    assert [line["reason"] for line in lines(tmp_path, "nodes_left")] == ([why] if spare else [])


def test_a_spare_node_goes_without_a_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands: Hands, follower: AttemptFollower
) -> None:
    job = Job("node3")
    found, nodes = departures(tmp_path, job, monkeypatch)
    found.consider(follower)
    assert (hands.told, nodes.left_out, job.left) == ([], ["node3"], ["node3"])
    job.given = [NodesGivenBack(("node3",), "node3: Slurm shows it as leaving")]
    job.departing = {}
    found.consider(follower)
    assert [line["nodes"] for line in lines(tmp_path, "nodes_given_back")] == [["node3"]]


def test_who_can_go_nowhere_stays_and_says_so_once(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    hands: Hands,
    follower: AttemptFollower,
    capsys: pytest.CaptureFixture[str],
) -> None:
    found, nodes = departures(tmp_path, Job("node1", comes_back=False), monkeypatch)
    for _ in range(3):
        found.consider(follower)
    assert hands.told == []
    assert found.leave(ATTEMPT, None) is None
    assert nodes.left_out == []
    assert capsys.readouterr().err.count("the job cannot be requeued: it stays") == 1


def test_a_program_that_may_lose_steps_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hands: Hands
) -> None:
    found, _ = departures(tmp_path, Job("node2"), monkeypatch)
    silent: Any = SimpleNamespace(reports_nothing=True, trains=False, attempt=ATTEMPT)
    found.consider(silent)  # and would fail if it were asked to stop


def test_what_was_too_few_anyway_goes_without_all_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, _ = departures(tmp_path, Job("node3"), monkeypatch)
    few = CannotRestart("too few nodes", ("node2",))
    unable = found.leave(ATTEMPT, few)
    assert unable == CannotRestart(f"too few nodes; node3 is to go: {DRAINS}", ("node2", "node3"))
    outside = Departures(found._launcher, None, found._ledger, 60.0)
    assert outside.leave(ATTEMPT, few) is few
