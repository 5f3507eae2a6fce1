"""What the supervisor makes of what it hears, in whatever order it comes."""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue

import pytest
from harness import Clock

from kempner.config.resilience import ResilienceSection
from kempner.config.sections import Config, SuperviseSection
from kempner.run.control.launch_env import Launch
from kempner.run.control.protocol import (
    EVALUATED,
    SIGNALLED,
    DumpStacks,
    Event,
    FromSupervisor,
    Outcome,
    PeerLost,
    Phase,
    Report,
    Stop,
    Usage,
)
from kempner.run.process import awake_clock as awake
from kempner.run.process.signals import Received
from kempner.run.record.attempts import Attempt
from kempner.run.record.ledger import Ledger, read_lines
from kempner.run.record.save_times import Durations
from kempner.supervisor.attempt import EXIT_GRACE, JOIN, RECONNECT, AttemptEvent, Watch
from kempner.supervisor.control.events import Connected, Disconnected, Heard, LastReport
from kempner.supervisor.policy.outcome import RankExit, decide_outcome
from kempner.supervisor.slurm.job_monitor import JobMonitor


class Hands:
    """Stands for launcher and channel: keeps what it is asked to do."""

    address = "127.0.0.1"
    nodes: tuple[str, ...] = ()

    def __init__(self) -> None:
        self.told: list[FromSupervisor] = []
        self.asked_to_stop = self.killed = 0
        self.living = True
        self.seen: dict[int, LastReport] = {}
        self.used: dict[int, Usage] = {}

    def start(
        self, launch: Launch, arguments: Sequence[str], post: Callable[[RankExit], None]
    ) -> None: ...

    def alive(self) -> bool:
        return self.living

    def ask_to_stop(self) -> None:
        self.asked_to_stop += 1

    def kill(self) -> None:
        self.killed += 1

    def last_reports(self) -> dict[int, LastReport]:
        return self.seen

    def usage(self) -> dict[int, Usage]:
        return self.used

    def tell(self, message: FromSupervisor, rank: int | None = None) -> None:
        self.told.append(message)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(awake, "time", clock)
    return clock


@pytest.fixture
def hands() -> Hands:
    return Hands()


@pytest.fixture
def watch(hands: Hands, tmp_path: Path, clock: Clock) -> Watch:
    config = Config(
        supervise=SuperviseSection(stop_grace=60.0, crash_grace=5.0),
        resilience=ResilienceSection(hang_timeout_max=1000.0),
    )
    ledger = Ledger(tmp_path / "ledger.jsonl")
    return Watch(Attempt(4, "abcd"), 3, config, hands, hands, ledger, Durations(), None)  # type: ignore[arg-type]


def let(watch: Watch, clock: Clock, seconds: float) -> None:
    """Let time pass as the supervisor's loop sees it, which looks twice a second."""
    end = clock.now + seconds
    while clock.now < end:
        clock.now = min(end, clock.now + 0.5)
        watch.enforce()


def feed(watch: Watch, *incoming: AttemptEvent) -> None:
    waiting: SimpleQueue[AttemptEvent] = SimpleQueue()
    for attempt_event in incoming:
        waiting.put(attempt_event)
    watch.take_in(waiting, wait=False)


def test_the_first_sign_of_an_end_counts_not_its_confirmation(
    watch: Watch, hands: Hands, clock: Clock
) -> None:
    feed(watch, Disconnected(1, "closed by the other side"))
    clock.now += 0.01
    feed(watch, Heard(0, Outcome(1, 1, "KeyError: what follows when a peer is gone")))
    clock.now += 0.01
    feed(watch, RankExit(1, -signal.SIGKILL), RankExit(0, 1))
    assert [end.rank for end in watch.ends] == [1, 0]
    decision = decide_outcome(watch.ends, stop_requested=False)
    assert (decision.culprit, decision.reason) == (1, "rank 1 was killed by SIGKILL")
    assert len([m for m in hands.told if isinstance(m, PeerLost)]) == 1


def test_a_connection_that_comes_back_is_no_end(watch: Watch, hands: Hands, clock: Clock) -> None:
    feed(watch, Disconnected(1, "reset"))
    clock.now += RECONNECT - 0.1
    feed(watch, Connected(1, "host", 7))
    let(watch, clock, 100)
    assert watch.ends == []
    assert hands.told == []
    feed(watch, Disconnected(1, "reset"))
    let(watch, clock, RECONNECT + 0.1)
    assert watch.ends == [RankExit(1, None)]
    assert hands.told == [PeerLost(1, "disappeared without a message")]


def test_a_rank_that_never_joins_is_missed(watch: Watch, hands: Hands, clock: Clock) -> None:
    let(watch, clock, 2 * JOIN)  # none has: the machines may still be starting
    feed(watch, Connected(0, "host", 7))
    let(watch, clock, JOIN - 1)
    feed(watch, Connected(1, "other", 8))
    let(watch, clock, JOIN - 1)
    assert watch.ends == []
    let(watch, clock, 2)
    assert decide_outcome(watch.ends, stop_requested=False).culprit == 2
    assert hands.told == [PeerLost(2, "disappeared without a message: it has never joined")]


def test_who_stays_after_a_stop_is_killed_in_the_end(
    watch: Watch, hands: Hands, clock: Clock
) -> None:
    feed(watch, Received(signal.SIGTERM, clock.now), Received(signal.SIGTERM, clock.now))
    assert hands.told == [Stop("SIGTERM", 60.0)]
    assert hands.asked_to_stop == 1
    let(watch, clock, 59)
    assert not hands.killed
    let(watch, clock, 2)
    assert hands.killed


def test_who_stays_after_another_failed_is_killed_in_the_end(
    watch: Watch, hands: Hands, clock: Clock
) -> None:
    feed(watch, RankExit(2, 74))
    let(watch, clock, 4.9)
    assert not hands.killed
    let(watch, clock, 0.2)
    assert hands.killed


def test_a_rank_without_a_connection_is_not_lost_while_steps_are_made(
    watch: Watch, hands: Hands, clock: Clock
) -> None:
    feed(watch, Disconnected(1, "connection timed out"))
    for step in range(1, 5):
        hands.seen = {0: LastReport(Report(step, Phase.STEP, 0.0, 0.0), clock.now)}
        let(watch, clock, RECONNECT - 0.5)
    assert watch.ends == []
    let(watch, clock, RECONNECT + 0.1)
    assert [end.rank for end in watch.ends] == [1]


def test_a_rank_that_was_stopped_alone_stops_the_others(watch: Watch, hands: Hands) -> None:
    feed(watch, Heard(2, Outcome(1, 75, "stopped before training began")))
    assert hands.told == [Stop("rank 2 was asked to stop", 60.0)]
    assert hands.asked_to_stop == 1


def test_it_is_over_when_all_have_said_so_even_if_the_launcher_never_does(
    watch: Watch, hands: Hands, clock: Clock
) -> None:
    for rank in range(3):
        assert not watch.over()
        feed(watch, Heard(rank, Outcome(1, 0, "")), Disconnected(rank, "closed"))
    assert not watch.over()  # their processes may still be about to leave
    let(watch, clock, EXIT_GRACE + 0.1)
    assert watch.over()
    assert [end.status for end in watch.ends] == [0, 0, 0]


def test_events_of_ranks_become_lines_of_the_ledger(watch: Watch, tmp_path: Path) -> None:
    feed(watch, Heard(0, Event(1, "saved", {"step": 7})))
    (line,) = read_lines(tmp_path / "ledger.jsonl")
    assert (line["attempt"], line["step"]) == (4, 7)


def test_a_hang_is_ended_after_the_stacks_were_written(
    watch: Watch, hands: Hands, clock: Clock, tmp_path: Path
) -> None:
    hands.seen = {
        rank: LastReport(Report(5, Phase.STEP, 0.0, 0.0), clock.now) for rank in (0, 1, 2)
    }
    let(watch, clock, 999)
    assert hands.told == []
    let(watch, clock, 2)
    assert hands.told == [DumpStacks()]
    assert not hands.killed
    let(watch, clock, 4)
    assert hands.killed
    assert watch.hang is not None
    (line,) = (e for e in read_lines(tmp_path / "ledger.jsonl") if e["event"] == "hang")
    assert "step 5 (step)" in line["reason"]
    assert line["waiting"] == {"nothing": [0, 1, 2]}


def test_what_ranks_say_of_an_evaluation_tells_how_long_one_may_last(
    watch: Watch, hands: Hands, clock: Clock
) -> None:
    said = {"step": 5, "loss": 2.5, "seconds": 31.0}
    feed(watch, Heard(0, Event(1, EVALUATED, said)))
    hands.seen = {
        rank: LastReport(Report(9, Phase.EVAL, 0.0, 0.0), clock.now) for rank in (0, 1, 2)
    }
    let(watch, clock, 309)
    assert hands.told == []
    let(watch, clock, 2)
    assert hands.told == [DumpStacks()]


def test_a_signal_to_the_ranks_alone_has_slurm_asked_at_once(
    hands: Hands, tmp_path: Path, clock: Clock
) -> None:
    asked: list[str] = []
    job = JobMonitor("7", batch=True, arguments=[])
    job.look = lambda: asked.append(job.id)  # type: ignore[method-assign]
    ledger = Ledger(tmp_path / "ledger.jsonl")
    watch = Watch(Attempt(4, "abcd"), 1, Config(), hands, hands, ledger, Durations(), job)  # type: ignore[arg-type]
    feed(watch, Heard(0, Event(1, "saved", {"step": 7})))
    assert asked == []
    feed(watch, Heard(0, Event(2, SIGNALLED, {})))
    assert asked == ["7"]
