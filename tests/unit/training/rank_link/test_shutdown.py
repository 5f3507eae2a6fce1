"""How a stop that is asked for is taken: the table of states, and what is known of a request."""

from __future__ import annotations

import math
import signal
import threading
import time

import pytest
from patience import scaled

from kempner.run.process.exit_codes import StopReason, reason_of_signal
from kempner.run.process.signals import ReceivedSignal
from kempner.training.rank_link import shutdown as shutdown_module
from kempner.training.rank_link.shutdown import (
    TRANSITIONS,
    ListenerAction,
    ListenerTrigger,
    State,
    StopListener,
    StopRequest,
)


@pytest.mark.parametrize(
    ("state", "trigger", "then", "action"),
    [
        (State.ALONE, ListenerTrigger.CONNECT, State.CONNECTED, ListenerAction.NOTHING),
        (State.ALONE, ListenerTrigger.JOIN, State.IN_GROUP, ListenerAction.NOTHING),
        (State.ALONE, ListenerTrigger.SIGNAL, State.LEAVING, ListenerAction.EXIT),
        (State.ALONE, ListenerTrigger.ORDER, State.LEAVING, ListenerAction.EXIT),
        (State.CONNECTED, ListenerTrigger.CONNECT, State.CONNECTED, ListenerAction.NOTHING),
        (State.CONNECTED, ListenerTrigger.JOIN, State.IN_GROUP, ListenerAction.NOTHING),
        (State.CONNECTED, ListenerTrigger.SIGNAL, State.LEAVING, ListenerAction.TELL_AND_EXIT),
        (State.CONNECTED, ListenerTrigger.ORDER, State.LEAVING, ListenerAction.TELL_AND_EXIT),
        (State.IN_GROUP, ListenerTrigger.CONNECT, State.IN_GROUP, ListenerAction.NOTHING),
        (State.IN_GROUP, ListenerTrigger.JOIN, State.IN_GROUP, ListenerAction.NOTHING),
        (State.IN_GROUP, ListenerTrigger.SIGNAL, State.IN_GROUP, ListenerAction.REQUEST_AND_TELL),
        (State.IN_GROUP, ListenerTrigger.ORDER, State.IN_GROUP, ListenerAction.REQUEST),
        (State.ALONE, ListenerTrigger.INSIST, State.LEAVING, ListenerAction.EXIT),
        (State.CONNECTED, ListenerTrigger.INSIST, State.LEAVING, ListenerAction.TELL_AND_EXIT),
        (State.IN_GROUP, ListenerTrigger.INSIST, State.LEAVING, ListenerAction.EXIT_AT_ONCE),
        *[
            (State.LEAVING, trigger, State.LEAVING, ListenerAction.NOTHING)
            for trigger in ListenerTrigger
        ],
    ],
)
def test_what_follows_in_each_state(
    state: State, trigger: ListenerTrigger, then: State, action: ListenerAction
) -> None:
    assert TRANSITIONS[state, trigger] == (then, action)


def test_the_table_knows_every_pair() -> None:
    assert set(TRANSITIONS) == {(state, trigger) for state in State for trigger in ListenerTrigger}


@pytest.mark.parametrize(
    ("number", "gone", "reason"),
    [
        (signal.SIGTERM, False, StopReason.SIGNAL),
        (signal.SIGUSR1, False, StopReason.SIGNAL),
        (signal.SIGINT, False, StopReason.INTERRUPT),
        (signal.SIGTERM, True, StopReason.SUPERVISOR_LOST),
        (signal.SIGINT, True, StopReason.INTERRUPT),
    ],
)
def test_what_a_signal_says(number: signal.Signals, gone: bool, reason: StopReason) -> None:
    assert reason_of_signal(number, gone) is reason


def test_reasons_are_spelt_in_one_way() -> None:
    assert [StopReason.of_label(reason.label) for reason in StopReason] == list(StopReason)
    assert StopReason.TIME_LIMIT.label == "time_limit"
    assert StopReason.TIME_LIMIT.words == "time limit"
    assert [StopReason.of_label(odd) for odd in ("SIGNAL", "", None, 3)] == [StopReason.NONE] * 4


EARLIER = StopRequest(StopReason.SIGNAL, asked_at=10.0, deadline=70.0, sentence="SIGTERM")


@pytest.mark.parametrize(
    ("later", "joined", "news"),
    [
        (StopRequest(StopReason.SIGNAL, 11.0), EARLIER, False),
        (StopRequest(StopReason.SIGNAL, 11.0, 71.0, "SIGTERM"), EARLIER, False),
        (
            StopRequest(StopReason.SIGNAL, 11.0, 40.0, "SIGUSR1"),
            StopRequest(StopReason.SIGNAL, 10.0, 40.0, "SIGTERM"),
            True,
        ),
        (
            StopRequest(StopReason.TIME_LIMIT, 11.0, 130.0, "a warning"),
            StopRequest(StopReason.TIME_LIMIT, 10.0, 70.0, "a warning"),
            True,
        ),
        (StopRequest(StopReason.NONE, 11.0, sentence="?"), EARLIER, False),
    ],
)
def test_a_later_request_adds_what_it_knows_better(
    later: StopRequest, joined: StopRequest, news: bool
) -> None:
    assert EARLIER.joined_with(later) == joined
    assert joined.adds_to(EARLIER) is news
    assert EARLIER.adds_to(None)


def test_the_nearest_deadline_and_the_best_reason_count() -> None:
    shutdown = StopListener()
    shutdown.join_group()
    assert (shutdown.reason(), shutdown.seconds_left()) == (StopReason.NONE, None)
    assert not shutdown.should_shutdown()
    shutdown.stop(StopReason.SIGNAL)
    assert (shutdown.reason(), shutdown.seconds_left()) == (StopReason.SIGNAL, None)
    assert shutdown.should_shutdown()
    shutdown.stop(StopReason.PREEMPTION, seconds_left=1000.0, sentence="others come first")
    shutdown.stop(StopReason.SIGNAL, seconds_left=100.0, sentence="SIGTERM")
    shutdown.stop(StopReason.SIGNAL, seconds_left=500.0)
    left = shutdown.seconds_left()
    assert left is not None
    assert 0 < left <= 100.0
    assert shutdown.seconds_since_asked() >= 0
    assert shutdown.reason() is StopReason.PREEMPTION
    assert shutdown.sentence(StopReason.PREEMPTION) == "others come first"
    assert shutdown.sentence(StopReason.CANCEL) == ""


def test_in_a_group_a_signal_is_told_if_it_is_the_first_to_ask() -> None:
    told: list[str] = []
    shutdown = StopListener()
    shutdown.connect(told.append, supervisor_gone=lambda: True)
    shutdown.join_group(grace=60.0, on_signal=told.append)
    for number in (signal.SIGTERM, signal.SIGTERM):
        shutdown._signalled(ReceivedSignal(number, time.monotonic()))
    assert told == ["the supervisor has ended"]
    assert shutdown.reason() is StopReason.SUPERVISOR_LOST
    assert shutdown.seconds_left() == pytest.approx(60.0, abs=10.0)
    ordered = StopListener()
    ordered.join_group(on_signal=told.append)
    ordered.stop(StopReason.CANCEL)
    ordered._signalled(ReceivedSignal(signal.SIGTERM, time.monotonic()))
    assert told == ["the supervisor has ended"]
    assert ordered.reason() is StopReason.CANCEL
    assert math.isinf(ordered._grace)


def test_a_connected_rank_says_why_it_leaves_and_leaves_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[object] = []
    left = threading.Event()

    def leave(why: str) -> None:
        said.append(why)
        left.set()

    monkeypatch.setattr(shutdown_module, "exit_before_training", leave)
    shutdown = StopListener()
    shutdown.connect(lambda sentence: said.append((sentence, threading.current_thread().name)))
    shutdown.stop(StopReason.TIME_LIMIT, 30.0, "Slurm sent a warning")
    assert left.wait(scaled(20))
    shutdown.stop(StopReason.CANCEL)
    shutdown._signalled(ReceivedSignal(signal.SIGTERM, time.monotonic()))
    assert said == [
        ("stopped before training began (time limit)", "exit"),
        "Slurm sent a warning",
    ]
    alone = StopListener()
    alone._signalled(ReceivedSignal(signal.SIGTERM, time.monotonic()))
    assert said[2:] == ["SIGTERM"]
