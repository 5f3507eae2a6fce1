"""Ranks that do not answer or do not end, and what is made of them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from following import Hands, feed, follow, let
from harness import Clock

from kempner.cluster.slurm import scontrol
from kempner.cluster.slurm.command import SlurmSilentError
from kempner.cluster.slurm.job import JobState, parse_job
from kempner.config.sections import Config
from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    Outcome,
    Phase,
    RankMessage,
    Report,
    Stop,
)
from kempner.run.link.client import RETRY
from kempner.run.link.wire import PATIENCE, UNACKNOWLEDGED
from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.events import NodeSuspected
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.run_dir import RunDirectory
from kempner.supervisor.attempt import AttemptFollower
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.control.rank_connections import AWAY, RECONNECT
from kempner.supervisor.launchers.agents.node_agent import AGAIN
from kempner.supervisor.policy.outcome import RankExit, decide_outcome
from kempner.supervisor.policy.restart import Failure
from kempner.supervisor.recovery import restart_or_finish
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobSeen


def test_who_cannot_be_killed_is_left_behind_in_time_for_the_requeue(
    hands: Hands, tmp_path: Path, clock: Clock
) -> None:
    """A rank that waits in the kernel, for storage that does not answer."""
    ledger = tmp_path / "ledger.jsonl"
    follower = follow(hands, 2, Config(), Ledger(ledger), JobMonitor("7", True, arguments=[]))
    running = parse_job({"JobId": "7", "JobState": "RUNNING"})
    feed(follower, Connected(0, "node1", 7), Connected(1, "node2", 8))
    feed(follower, JobSeen(running, 100.0, 30.0))
    follower.enforce()
    assert hands.told == [Stop(StopReason.DEADLINE, "100 s are left of the job's time", 85.0)]
    feed(follower, RankMessage(0, Outcome(1, 75, "")), Disconnected(0, "closed"))
    let(follower, clock, 84)
    assert not hands.killed
    let(follower, clock, 2)
    assert hands.killed
    assert not follower.life.over
    let(follower, clock, 7)
    assert follower.life.over
    assert clock.now < 200 - 5  # so much is left for the requeue
    (suspect,) = (e for e in read_lines(ledger) if e["event"] == "suspect")
    assert suspect["node"] == "node2"
    assert "rank 1, process 8, does not end though it was killed" in suspect["reason"]
    assert follower.roster.stuck == {1: Connected(1, "node2", 8)}
    assert decide_outcome(follower.ends, follower.stop.reason).code == 75


@pytest.mark.parametrize("cut", [1.0, 5.0, 15.0, AWAY - 5])
def test_a_rank_that_the_network_cuts_off_is_not_given_up_while_it_may_come_back(
    follower: AttemptFollower, hands: Hands, clock: Clock, cut: float
) -> None:
    """A step takes longer than all of that, so that none is made meanwhile."""
    hands.seen = {1: LastReport(Report(7, Phase.STEP, 0.0, 0.0), clock.now)}
    feed(follower, *(Connected(rank, "host", 7 + rank) for rank in range(3)))
    let(follower, clock, 1.0)
    let(follower, clock, min(cut, UNACKNOWLEDGED))
    feed(follower, Disconnected(1, "connection timed out"))
    let(follower, clock, cut - min(cut, UNACKNOWLEDGED) + 4)
    feed(follower, Connected(1, "host", 7))
    let(follower, clock, 100)
    assert follower.ends == []
    feed(follower, Disconnected(1, "connection timed out"))
    hands.seen = {1: LastReport(Report(7, Phase.STEP, 0.0, 0.0), clock.now)}  # by file
    let(follower, clock, AWAY)
    assert follower.ends == []
    let(follower, clock, 0.6)
    assert follower.ends == [RankExit(1, None)]


def test_a_rank_is_not_waited_for_any_more_once_another_has_failed_for_want_of_it(
    follower: AttemptFollower, clock: Clock
) -> None:
    feed(follower, *(Connected(rank, "host", 7 + rank) for rank in range(3)))
    feed(follower, Disconnected(1, "connection reset by peer"))
    clock.now += 0.1
    feed(follower, RankMessage(0, Outcome(1, 76, "lost another rank")))
    let(follower, clock, RECONNECT + 0.5)
    decision = decide_outcome(follower.ends)
    assert (decision.culprit, follower.roster.lost_hosts()) == (1, ["host"])


def test_who_is_cut_off_for_15_seconds_is_back_before_it_is_given_up() -> None:
    """Its agent connects first, to any of two addresses, and then the rank to its agent."""
    assert 15 + 2 * PATIENCE + AGAIN + RETRY[1] < AWAY


IN_BATCH = parse_job({"JobId": "7", "JobState": "RUNNING", "Requeue": "1", "BatchFlag": "1"})
TRAINED = Failure(step=31, committed=30)
NO_NETWORK = "the nodes would not all use the same network"


@pytest.mark.parametrize("answers", [1, 2])
def test_ranks_that_fail_before_slurm_has_said_anything_come_back_without_the_node(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, answers: int
) -> None:
    """It has said what the job is like in an earlier attempt, or is asked."""
    asked: list[str] = []

    def job_state(job: str, within: float = 0.0) -> JobState:
        asked.append(job)
        if len(asked) != answers:
            raise SlurmSilentError("no answer")
        return IN_BATCH

    monkeypatch.setattr(scontrol, "job_state", job_state)
    job, hands = JobMonitor("7", batch=True), Hands()
    if answers == 1:
        job.state(within=0.0)
    ledger = Ledger(tmp_path / "ledger.jsonl")
    ledger.record(NodeSuspected("node2", "it has no interface on the network of the others"), 4)
    follower = follow(hands, 2, Config(), ledger, job)
    feed(follower, RankExit(1, int(ExitCode.USAGE), sentence=NO_NETWORK))
    assert follower.job.at_first is None
    decision = decide_outcome(follower.ends)
    end = restart_or_finish(_context(tmp_path, ledger, job), follower, decision, [TRAINED])
    assert end is not None
    assert end.bad_nodes == ("node2",)


@pytest.mark.parametrize(
    ("status", "shown", "twice", "code"),
    [
        (ExitCode.CRASHED, {}, False, ExitCode.STOPPED),
        (ExitCode.CHECKPOINT_FAILED, {}, False, ExitCode.STOPPED),
        (ExitCode.CRASHED, {}, True, ExitCode.CRASHED),
        (ExitCode.CRASHED, {"Requeue": "0"}, False, ExitCode.CRASHED),
        (ExitCode.DIVERGED, {}, False, ExitCode.DIVERGED),
    ],
)
def test_a_rank_that_fails_as_it_stops_keeps_no_job_from_the_queue(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    status: ExitCode,
    shown: dict[str, str],
    twice: bool,
    code: ExitCode,
) -> None:
    """But for what no later start can help: the same exception at the same step, say."""
    job, hands = JobMonitor("7", batch=True), Hands()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    follower = follow(hands, 1, Config(), ledger, job)
    fields = {"JobId": "7", "JobState": "RUNNING", "Requeue": "1", "BatchFlag": "1"}
    seen = parse_job(fields | shown)
    monkeypatch.setattr(scontrol, "job_state", lambda job, within=0.0: seen)
    feed(follower, Connected(0, "node1", 7), JobSeen(seen, 100.0, 30.0))
    follower.enforce()
    feed(follower, RankExit(0, int(status), sentence="ValueError: no such thing"))
    decision = decide_outcome(follower.ends, follower.stop.reason)
    earlier = [Failure(follower.step_of(0), None, "ValueError: no such thing")] * twice
    context = _context(tmp_path, ledger, job)
    context.run = RunDirectory(tmp_path)
    end = restart_or_finish(context, follower, decision, earlier)
    assert end is not None
    assert end.code is code


def _context(folder: Path, ledger: Ledger, job: JobMonitor) -> Any:
    nodes = SimpleNamespace(
        all=("node1", "node2"),
        joined={},
        unavoidable=lambda suspects: [n for n in ("node1", "node2") if n in suspects],
    )
    launcher = SimpleNamespace(
        nodes=nodes,
        node_of=lambda rank: "node2",
        prepare_again=lambda lost, stuck: None,
    )
    return SimpleNamespace(
        config=Config(),
        departures=SimpleNamespace(leave=lambda attempt, unable: unable, left=set()),
        history=RunHistory.read(folder / "ledger.jsonl"),
        job=job,
        launcher=launcher,
        ledger=ledger,
        lease=SimpleNamespace(lost=False, stop_asked=False, check=lambda: None),
        signals=SimpleNamespace(received=[]),
    )
