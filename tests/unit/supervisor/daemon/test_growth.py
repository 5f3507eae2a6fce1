"""Nodes without ranks are asked while the ranks run, and taken back once they are well."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from following import Hands, follow_a_rank_that_trains
from harness import wait_until

from kempner.cluster.slurm.allocation import Allocation
from kempner.config.resilience import ResilienceSection
from kempner.config.sections import Config, SuperviseSection
from kempner.probe.node import ProbeQuestion, ProbeResult, measure
from kempner.run.control.protocol import Stop
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.attempts import Attempt
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor import context
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.context import Growth
from kempner.supervisor.launchers.base import CannotRestart, Idle, JoinedNode
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.recovery import restart_or_finish

ATTEMPT = Attempt(4, "abcd")


class Nodes:
    """A launcher that lacks node2, which answers as it is told to."""

    allocation = Allocation("7", ("node1",), 1, None, 0, batch=True)
    joined: Mapping[str, JoinedNode] = {}
    idle = Idle(("node2",), 1)

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch, self.asked, self.nodes = monkeypatch, 0, self
        self.answer: Callable[[ProbeResult], list[ProbeResult]] = lambda result: [result]

    def ask_idle(self, question: ProbeQuestion) -> Sequence[ProbeResult]:
        self.asked += 1
        with self._patch.context() as there:
            there.setenv("SLURMD_NODENAME", "node2")
            found = measure(replace(question, on_one_node=True))
        return self.answer(found)


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Nodes:
    monkeypatch.setattr(context, "OFTEN", 0.01)
    monkeypatch.setenv("SLURMD_NODENAME", "node1")
    return Nodes(monkeypatch)


@pytest.fixture
def follower(hands: Hands, tmp_path: Path) -> AttemptFollower:
    return follow_a_rank_that_trains(hands, Ledger(tmp_path / "ledger.jsonl"))


@pytest.fixture
def of(nodes: Nodes, tmp_path: Path) -> Iterator[Callable[..., Growth]]:
    made: list[Growth] = []

    def make(*lines: dict[str, Any], grow: bool = True, suspects: str | None = None) -> Growth:
        section = SuperviseSection(grow=grow, grow_after=0.02)
        config = Config(supervise=section, resilience=ResilienceSection(suspects_dir=suspects))
        launcher: Any = nodes
        found = Growth(launcher, RunDirectory(tmp_path / "run"), config, ours=True)
        found.watch(ATTEMPT, RunHistory(lines))
        made.append(found)
        return found

    yield make
    for one in made:
        one.end_watch()


def taken_back(folder: Path) -> list[tuple[list[str], int]]:
    """What the ledger says of it: nodes, and the attempt after which."""
    lines = read_lines(folder / "ledger.jsonl")
    return [(e["nodes"], e["attempt"]) for e in lines if e["event"] == "nodes_taken_back"]


def looked(nodes: Nodes, found: Growth, follower: AttemptFollower, times: int = 5) -> None:
    """The supervisor goes on until the node was asked a few times more."""
    before = nodes.asked

    def done() -> bool:
        found.consider(follower)
        return nodes.asked > before + times

    wait_until(done, "the node is asked")


def test_a_node_that_is_well_for_long_enough_is_taken_back(
    nodes: Nodes, hands: Hands, follower: AttemptFollower, of: Callable[..., Growth], tmp_path: Path
) -> None:
    found, ledger = of(), Ledger(tmp_path / "ledger.jsonl")
    nodes.answer = lambda result: [replace(result, troubles={"x": "its /dev/shm is full"})]
    looked(nodes, found, follower)
    nodes.answer = lambda result: []
    looked(nodes, found, follower)
    found.take_back(ledger, ATTEMPT)
    assert (hands.told, taken_back(tmp_path)) == ([], [])
    nodes.answer = lambda result: [result]

    def asked() -> bool:
        found.consider(follower)
        return bool(hands.told)

    wait_until(asked, "the ranks are asked to stop")
    (stop,) = hands.told
    assert isinstance(stop, Stop)
    assert (stop.reason, stop.sentence) == (
        StopReason.GROW,
        "node2 is well again: from 1 to 2 nodes",
    )
    found.end_watch()
    found.take_back(ledger, ATTEMPT)
    assert taken_back(tmp_path) == [(["node2"], 4)]


def test_ranks_that_fail_meanwhile_take_it_back_with_their_restart(
    nodes: Nodes, hands: Hands, follower: AttemptFollower, of: Callable[..., Growth], tmp_path: Path
) -> None:
    hands.seen = {}  # they do not train yet
    found, ledger = of(), Ledger(tmp_path / "ledger.jsonl")
    looked(nodes, found, follower)
    found.take_back(ledger, ATTEMPT)
    assert hands.told == []
    assert taken_back(tmp_path) == [(["node2"], 4)]


def test_a_node_that_is_well_now_and_then_stays_out(
    nodes: Nodes, hands: Hands, follower: AttemptFollower, of: Callable[..., Growth], tmp_path: Path
) -> None:
    hands.seen = {}
    found = of()
    looked(nodes, found, follower)
    nodes.answer = lambda result: []
    looked(nodes, found, follower)
    found.take_back(Ledger(tmp_path / "ledger.jsonl"), ATTEMPT)
    assert (hands.told, taken_back(tmp_path)) == ([], [])


def test_nobody_is_well_where_the_question_cannot_be_put(
    hands: Hands, follower: AttemptFollower, of: Callable[..., Growth], tmp_path: Path
) -> None:
    in_the_way = RunDirectory(tmp_path / "run").attempt(4) / "health"
    in_the_way.parent.mkdir(parents=True)
    in_the_way.write_text("")
    found = of()
    watched = found.watched
    assert watched is not None
    wait_until(lambda: watched.latest is not None, "a look")
    found.consider(follower)
    assert watched.latest is not None
    assert (hands.told, watched.latest.well) == ([], frozenset())


@pytest.mark.parametrize("why", ["failed", "others"])
def test_a_node_that_is_suspect_for_what_no_check_sees_stays_out(
    nodes: Nodes,
    hands: Hands,
    follower: AttemptFollower,
    of: Callable[..., Growth],
    tmp_path: Path,
    why: str,
) -> None:
    failed = {"event": "attempt_failed", "step": 7, "committed": None, "node": "node2"}
    ecc = {**failed, "raised": "CUDA error: uncorrectable ECC error", "attempt": 3}
    told = '{"node": "node2", "reason": "ECC", "since": 1.0, "until": 9e9, "run": "another"}'
    group = tmp_path / "group"
    group.mkdir()
    if why == "others":
        (group / "node2.json").write_text(told)
    lines = [{**ecc, "time": 8e9}] if why == "failed" else []
    found = of(*lines, suspects=str(group))
    looked(nodes, found, follower)
    assert hands.told == []


def test_without_grow_nobody_is_asked(
    nodes: Nodes, hands: Hands, follower: AttemptFollower, of: Callable[..., Growth], tmp_path: Path
) -> None:
    found, ledger = of(grow=False), Ledger(tmp_path / "ledger.jsonl")
    found.consider(follower)
    found.take_back(ledger, ATTEMPT)
    assert (hands.told, nodes.asked, taken_back(tmp_path)) == ([], 0, [])


STOPPED = Decision(ExitCode.STOPPED, "stopped to continue on more nodes")


class Context:
    """What a supervisor has at hand, as far as it is asked; it keeps who took nodes back."""

    program = SimpleNamespace(ours=True)

    def __init__(self, unable: CannotRestart | None, signals: int, lost: bool = False) -> None:
        self.history, self.ledger, self.taken_back = RunHistory(), object(), 0
        self.signals = SimpleNamespace(received=[object()] * signals)
        self.lease = SimpleNamespace(lost=lost, check=lambda: None)
        nodes = SimpleNamespace(all=("node1",), joined={})
        self.launcher = SimpleNamespace(prepare_again=lambda lost, stuck: unable, nodes=nodes)
        self.growth, self.job = self, None
        self.departures = SimpleNamespace(leave=lambda attempt, unable: unable, left=set())

    def take_back(self, ledger: object, attempt: object) -> None:
        self.taken_back += 1

    def explains(self, reason: StopReason) -> bool:
        return False


def stopped(reason: StopReason, late: bool) -> Any:
    roster = SimpleNamespace(lost_hosts=list, stuck_pids=dict)
    told = {
        "stop": SimpleNamespace(reason=reason),
        "roster": roster,
        "attempt": object(),
        "reports_nothing": False,
    }
    return SimpleNamespace(**told, must_stop=lambda: late)


GONE = CannotRestart("too few nodes: node1: it does not respond", ("node1",))


@pytest.mark.parametrize(
    ("reason", "unable", "signals", "late", "words", "taken_back"),
    [
        (StopReason.GROW, None, 0, False, None, 1),
        (StopReason.GROW, None, 1, False, "stopped; start again to continue", 0),
        (StopReason.GROW, None, 0, True, "stopped; start again to continue", 0),
        (StopReason.GROW, GONE, 0, False, "too few nodes: node1: it does not respond", 0),
        (StopReason.TIME_LIMIT, None, 0, False, STOPPED.reason, 0),
    ],
)
def test_the_ranks_start_again_unless_something_else_is_wanted(
    reason: StopReason,
    unable: CannotRestart | None,
    signals: int,
    late: bool,
    words: str | None,
    taken_back: int,
) -> None:
    context: Any = Context(unable, signals)
    end = restart_or_finish(context, stopped(reason, late), STOPPED, ())
    assert (end.reason if end else None) == words
    assert end is None or end.code is ExitCode.STOPPED
    assert (end.bad_nodes if end else ()) == (("node1",) if unable else ())
    assert context.taken_back == taken_back
