"""What the supervisor makes of what it hears, in whatever order it comes."""

from __future__ import annotations

import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from following import Hands, feed, follow, let
from harness import Clock

from kempner.cluster.slurm.job import parse_job
from kempner.config.sections import Config
from kempner.probe.gpu_events import trouble_of
from kempner.run.control.protocol import (
    Connected,
    Disconnected,
    DumpStacks,
    Event,
    Outcome,
    PeerLost,
    Phase,
    RankMessage,
    Report,
    Stop,
)
from kempner.run.process.exit_codes import StopReason
from kempner.run.process.signals import ReceivedSignal
from kempner.run.record.events import GpuFailed
from kempner.run.record.history import RunHistory
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.save_times import SaveSeconds
from kempner.supervisor.attempt import EXIT_GRACE, EXPLAINED_WITHIN, AttemptFollower
from kempner.supervisor.control.program_reports import LastReport
from kempner.supervisor.control.rank_connections import JOIN, RECONNECT
from kempner.supervisor.launchers.agents.messages import GpuReport
from kempner.supervisor.nodes.exclusion import suspects
from kempner.supervisor.policy.outcome import RankExit, decide_outcome
from kempner.supervisor.policy.stop import StopOrder
from kempner.supervisor.slurm.job_monitor import JobMonitor, JobSeen


def test_the_first_sign_of_an_end_counts_not_its_confirmation(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(follower, Disconnected(1, "closed by the other side"))
    clock.now += 0.01
    feed(follower, RankMessage(0, Outcome(1, 1, "KeyError: what follows when a peer is gone")))
    clock.now += 0.01
    feed(follower, RankExit(1, -signal.SIGKILL), RankExit(0, 1))
    assert [end.rank for end in follower.ends] == [1, 0]
    decision = decide_outcome(follower.ends)
    assert (decision.culprit, decision.reason) == (1, "rank 1 was killed by SIGKILL")
    assert follower.seconds_ending() == pytest.approx(0.02)
    assert len([m for m in hands.told if isinstance(m, PeerLost)]) == 1


def test_a_connection_that_comes_back_is_no_end(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(follower, Disconnected(1, "closed by the other side", hung_up=True))
    clock.now += RECONNECT - 0.1
    feed(follower, Connected(1, "host", 7))
    let(follower, clock, 100)
    assert follower.ends == []
    assert hands.told == []
    feed(follower, Disconnected(1, "closed by the other side", hung_up=True))
    let(follower, clock, RECONNECT + 0.1)
    assert follower.ends == [RankExit(1, None)]
    assert hands.told == [PeerLost(1, "disappeared without a message")]


def test_a_rank_that_never_joins_is_missed(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    let(follower, clock, 2 * JOIN)  # none has: the machines may still be starting
    feed(follower, Connected(0, "host", 7))
    let(follower, clock, JOIN - 1)
    feed(follower, Connected(1, "other", 8))
    let(follower, clock, JOIN - 1)
    assert follower.ends == []
    let(follower, clock, 2)
    assert decide_outcome(follower.ends).culprit == 2
    assert hands.told == [PeerLost(2, "disappeared without a message: it has never joined")]


def test_who_stays_after_a_stop_is_killed_in_the_end(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(
        follower,
        ReceivedSignal(signal.SIGTERM, clock.now),
        ReceivedSignal(signal.SIGTERM, clock.now),
    )
    assert hands.told == [Stop(StopReason.SIGNAL, "SIGTERM", 60.0)]
    let(follower, clock, 59)
    assert not hands.killed
    let(follower, clock, 2)
    assert hands.killed


def test_who_stays_after_another_failed_is_killed_in_the_end(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(follower, RankExit(2, 74))
    let(follower, clock, 4.9)
    assert not hands.killed
    let(follower, clock, 0.2)
    assert hands.killed


def test_a_failure_during_a_stop_leaves_the_others_a_moment_only(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(follower, ReceivedSignal(signal.SIGTERM, clock.now))
    let(follower, clock, 20)
    feed(follower, RankExit(2, -signal.SIGKILL))
    let(follower, clock, 4.9)
    assert not hands.killed
    let(follower, clock, 0.2)
    assert hands.killed


def test_a_stop_after_a_failure_gives_nobody_more_time(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(follower, RankExit(2, 74), ReceivedSignal(signal.SIGTERM, clock.now))
    assert [type(message) for message in hands.told] == [PeerLost, Stop]
    let(follower, clock, 5.1)
    assert hands.killed


def test_a_rank_without_a_connection_is_not_lost_while_steps_are_made(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    feed(follower, Disconnected(1, "closed by the other side", hung_up=True))
    for step in range(1, 5):
        hands.seen = {0: LastReport(Report(step, Phase.STEP, 0.0, 0.0), clock.now)}
        let(follower, clock, RECONNECT - 0.5)
    assert follower.ends == []
    let(follower, clock, RECONNECT + 0.1)
    assert [end.rank for end in follower.ends] == [1]


def test_a_rank_that_was_stopped_alone_stops_the_others(
    follower: AttemptFollower, hands: Hands
) -> None:
    feed(follower, RankMessage(2, Outcome(1, 75, "stopped before training began")))
    stop = Stop(StopReason.PEER_STOPPED, "rank 2 was asked to stop", 60.0)
    # Who has met it already waits for it in vain: a request alone would not free that rank.
    assert hands.told == [stop, PeerLost(2, "stopped before training began")]


def test_what_the_ranks_say_of_a_stop_names_it_for_the_supervisor_too(
    follower: AttemptFollower, hands: Hands, tmp_path: Path
) -> None:
    assert follower.stop.reason is StopReason.NONE
    feed(follower, Connected(0, "node1", 4711))
    said = Event(1, "stopped", {"step": 7, "reason": "signal", "lost_steps": 0})
    feed(follower, RankMessage(0, said))
    assert follower.stop.reason is StopReason.NONE  # no rank has left yet
    feed(follower, RankMessage(0, Outcome(2, 75, "")))
    assert follower.stop.reason is StopReason.SIGNAL
    assert hands.told == [Stop(StopReason.SIGNAL, "rank 0 was asked to stop", 60.0)]
    decision = decide_outcome([RankExit(0, 75)], follower.stop.reason)
    assert decision.reason == "stopped (signal); start again to continue"
    lines = [e for e in read_lines(tmp_path / "ledger.jsonl") if e["event"] == "stop_requested"]
    assert [(e["reason"], e["sentence"]) for e in lines] == [("signal", "rank 0 was asked to stop")]


def test_the_ledger_waits_for_slurm_s_reason_for_a_rank_that_was_stopped_alone(
    hands: Hands, tmp_path: Path
) -> None:
    """A preemption signals the ranks, and one of them may leave before Slurm has said why."""
    job = JobMonitor("7", batch=True, arguments=[])
    follower = follow(hands, 2, Config(), Ledger(tmp_path / "ledger.jsonl"), job)
    fields = {"JobId": "7", "JobState": "RUNNING"}
    feed(follower, JobSeen(parse_job(fields), 900.0, 30.0))
    feed(follower, RankMessage(1, Outcome(1, 75, "stopped before training began")))
    preempted = parse_job(fields | {"PreemptTime": "2030-01-01T00:00:00"})
    feed(follower, JobSeen(preempted, 30.0, 30.0))
    follower.enforce()
    told = [message.reason for message in hands.told if isinstance(message, Stop)]
    assert told == [StopReason.PEER_STOPPED, StopReason.PREEMPTION]
    lines = [e for e in read_lines(tmp_path / "ledger.jsonl") if e["event"] == "stop_requested"]
    assert [e["reason"] for e in lines] == ["preemption"]


@pytest.mark.parametrize(("batch", "told"), [(False, 1), (True, 2)])
def test_a_ctrl_c_at_a_terminal_is_no_warning_of_slurm(
    hands: Hands, tmp_path: Path, clock: Clock, batch: bool, told: int
) -> None:
    """A batch process has no terminal: there SIGINT may be what `--signal` asked for."""
    job = JobMonitor("7", batch=batch, arguments=[])
    follower = follow(hands, 1, Config(), Ledger(tmp_path / "ledger.jsonl"), job)
    running = parse_job({"JobId": "7", "JobState": "RUNNING"})
    feed(follower, JobSeen(running, 900.0, 30.0), ReceivedSignal(signal.SIGINT, clock.now))
    follower.enforce()
    reasons = [message.reason for message in hands.told if isinstance(message, Stop)]
    assert reasons == [StopReason.INTERRUPT, StopReason.TIME_LIMIT][:told]


def test_saves_that_a_preemption_leaves_no_time_for_are_warned_of_once(
    hands: Hands, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    job = JobMonitor("7", batch=True, arguments=[])
    follower = follow(hands, 1, Config(), Ledger(tmp_path / "ledger.jsonl"), job)
    running = parse_job({"JobId": "7", "JobState": "RUNNING"})
    feed(follower, JobSeen(running, None, kill_wait=30.0, grace=10.0))
    warnings = []
    for seconds in (39.0, 41.0, 42.0):
        follower.times.saved(SaveSeconds(0.0, seconds, 0.0))
        follower.enforce()
        said = capfd.readouterr().err
        warnings.append("a save takes up to 41 s, and a preemption leaves 40 s" in said)
    assert warnings == [False, True, False]


def test_what_slurm_says_a_moment_after_the_signal_is_told_as_well(
    hands: Hands, tmp_path: Path, clock: Clock
) -> None:
    job = JobMonitor("7", batch=True, arguments=[])
    ledger, config = Ledger(tmp_path / "ledger.jsonl"), Config()
    follower = follow(hands, 1, config, ledger, job)
    running, before = parse_job({"JobId": "7", "JobState": "RUNNING"}), clock.now - 1.0
    feed(
        follower, JobSeen(running, 7200.0, 30.0, before), ReceivedSignal(signal.SIGTERM, clock.now)
    )
    follower.enforce()  # what it is warned of, only the next answer can tell
    cancelled = replace(running, state="COMPLETING")
    feed(follower, JobSeen(cancelled, None, 30.0))
    follower.enforce()
    follower.enforce()
    grace = config.supervise.stop_grace
    assert hands.told == [
        Stop(StopReason.SIGNAL, "SIGTERM", grace),
        Stop(StopReason.CANCEL, "it was cancelled", min(30.0, grace)),
    ]
    assert follower.stop.reason is StopReason.CANCEL
    (told,) = asked_of(tmp_path)  # no signal with minutes left before it
    assert (told["reason"], told["seconds_left"]) == ("cancel", min(30.0, grace))


def test_a_stop_to_grow_gives_way_to_a_signal(
    follower: AttemptFollower, hands: Hands, clock: Clock, tmp_path: Path
) -> None:
    assert not follower.trains
    feed(follower, *(Connected(rank, "host", 7 + rank) for rank in range(3)))
    loading = LastReport(Report(0, Phase.LOAD, 0.0, 0.0), clock.now)
    at_step = LastReport(Report(7, Phase.STEP, 0.0, 0.0), clock.now)
    hands.seen = {0: at_step, 1: loading, 2: at_step}
    assert not follower.trains
    hands.seen = dict.fromkeys(range(3), at_step)
    assert follower.trains
    follower.ask_to_stop(StopOrder(StopReason.GROW, "node2 is well again", 60.0))
    assert not follower.trains
    assert follower.stop.reason is StopReason.GROW
    feed(follower, ReceivedSignal(signal.SIGTERM, clock.now))
    assert follower.stop.reason is StopReason.SIGNAL
    feed(follower, ReceivedSignal(signal.SIGTERM, clock.now))
    reasons = [message.reason for message in hands.told if isinstance(message, Stop)]
    assert reasons == [StopReason.GROW, StopReason.SIGNAL]
    assert [told["reason"] for told in asked_of(tmp_path)] == ["grow", "signal"]


def asked_of(folder: Path) -> list[dict[str, Any]]:
    """The ledger's lines about stops that were asked for."""
    return [e for e in read_lines(folder / "ledger.jsonl") if e["event"] == "stop_requested"]


@pytest.mark.parametrize("left", [True, False])
def test_a_signal_that_slurm_does_not_explain_is_told_by_itself(
    hands: Hands, tmp_path: Path, clock: Clock, left: bool
) -> None:
    """After a moment, or when the ranks have left; with no more time than the job has."""
    job, ledger = JobMonitor("7", batch=True, arguments=[]), Ledger(tmp_path / "ledger.jsonl")
    follower = follow(hands, 1, Config(), ledger, job)
    job_seen = JobSeen(parse_job({"JobId": "7", "JobState": "SUSPENDED"}), 300.0, 30.0)
    feed(follower, job_seen, ReceivedSignal(signal.SIGTERM, clock.now))
    assert (hands.told, asked_of(tmp_path)) == ([Stop(StopReason.SIGNAL, "SIGTERM", 300.0)], [])
    hands.living = left
    let(follower, clock, EXPLAINED_WITHIN + 1.0 if left else 0.5)
    assert [(e["reason"], e["seconds_left"]) for e in asked_of(tmp_path)] == [("signal", 300.0)]


def test_it_is_over_when_all_have_said_so_even_if_the_launcher_never_does(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    for rank in range(3):
        assert not follower.life.over
        feed(follower, RankMessage(rank, Outcome(1, 0, "")), Disconnected(rank, "closed"))
    assert not follower.life.over  # their processes may still be about to leave
    let(follower, clock, EXIT_GRACE + 0.1)
    assert follower.life.over
    assert [end.status for end in follower.ends] == [0, 0, 0]


def test_events_of_ranks_become_lines_of_the_ledger(
    follower: AttemptFollower, tmp_path: Path
) -> None:
    feed(follower, RankMessage(0, Event(1, "resumed", {"step": 7})))
    (line,) = read_lines(tmp_path / "ledger.jsonl")
    assert (line["attempt"], line["step"]) == (4, 7)


def test_a_hang_is_ended_after_the_stacks_were_written(
    follower: AttemptFollower, hands: Hands, clock: Clock, tmp_path: Path
) -> None:
    hands.seen = {
        rank: LastReport(Report(5, Phase.STEP, 0.0, 0.0), clock.now) for rank in (0, 1, 2)
    }
    let(follower, clock, 999)
    assert hands.told == []
    let(follower, clock, 2)
    assert hands.told == [DumpStacks()]
    assert not hands.killed
    let(follower, clock, 4)
    assert hands.killed
    assert follower.evidence.hang is not None
    (line,) = (e for e in read_lines(tmp_path / "ledger.jsonl") if e["event"] == "hang")
    assert "step 5 (step)" in line["reason"]
    assert line["waiting"] == {"nothing": [0, 1, 2]}


def test_a_stop_does_not_keep_the_evidence_of_a_hang_from_being_collected(
    follower: AttemptFollower, hands: Hands, clock: Clock, tmp_path: Path
) -> None:
    hands.seen = {
        rank: LastReport(Report(5, Phase.STEP, 0.0, 0.0), clock.now) for rank in (0, 1, 2)
    }
    let(follower, clock, 1001)
    feed(follower, ReceivedSignal(signal.SIGTERM, clock.now))
    assert hands.told == [DumpStacks(), Stop(StopReason.SIGNAL, "SIGTERM", 60.0)]
    let(follower, clock, 4)
    assert hands.killed
    told = [e["event"] for e in read_lines(tmp_path / "ledger.jsonl")]
    assert told[-2:] == ["stop_requested", "hang"]


def test_while_a_stop_is_under_way_standing_still_is_no_hang(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    hands.seen = {
        rank: LastReport(Report(5, Phase.STEP, 0.0, 0.0), clock.now) for rank in (0, 1, 2)
    }
    let(follower, clock, 960)
    feed(follower, ReceivedSignal(signal.SIGTERM, clock.now))
    let(follower, clock, 59)
    assert follower.evidence.hang is None
    assert hands.told == [Stop(StopReason.SIGNAL, "SIGTERM", 60.0)]


def test_what_ranks_say_of_an_evaluation_tells_how_long_one_may_last(
    follower: AttemptFollower, hands: Hands, clock: Clock
) -> None:
    said = {"step": 5, "loss": 2.5, "seconds": 31.0}
    feed(follower, RankMessage(0, Event(1, "evaluated", said)))
    hands.seen = {
        rank: LastReport(Report(9, Phase.EVAL, 0.0, 0.0), clock.now) for rank in (0, 1, 2)
    }
    let(follower, clock, 309)
    assert hands.told == []
    let(follower, clock, 2)
    assert hands.told == [DumpStacks()]


def test_a_signal_to_the_ranks_alone_has_slurm_asked_at_once(
    hands: Hands, tmp_path: Path, clock: Clock
) -> None:
    asked: list[str] = []
    job = JobMonitor("7", batch=True, arguments=[])
    job.look = lambda: asked.append(job.id)  # type: ignore[method-assign]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    follower = follow(hands, 1, Config(), ledger, job)
    feed(follower, RankMessage(0, Event(1, "resumed", {"step": 7})))
    assert asked == []
    feed(follower, RankMessage(0, Event(2, "signalled", {})))
    assert asked == ["7"]


def test_errors_of_gpus_are_recorded_and_a_broken_one_makes_its_node_suspect(
    follower: AttemptFollower, hands: Hands, tmp_path: Path, clock: Clock
) -> None:
    for node, gpu, xid in (("node3", 5, 79), ("node4", 0, 94)):
        found = trouble_of(gpu, xid)
        assert found is not None
        hands.gpus.append((node, GpuReport(1, gpu, xid, found.reason, found.broken)))
    let(follower, clock, 1)
    history = RunHistory.read(tmp_path / "ledger.jsonl")
    lost, contained = history.events(GpuFailed)
    assert (lost.node, lost.gpu, lost.xid) == ("node3", 5, 79)
    assert lost.reason == "Xid 79 of GPU 5: it has fallen off the bus on node3"
    assert contained.reason.startswith("Xid 94 of GPU 0")
    found_unfit = suspects(history, time.time(), 3600.0)
    assert {node: one.reason for node, one in found_unfit.items()} == {
        "node3": "Xid 79 of GPU 5: it has fallen off the bus"
    }
