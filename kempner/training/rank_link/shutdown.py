"""`StopListener` notices a request to stop at any time, for the rank to act on where it is safe.

Imports no torch, because it is installed before torch is imported.
"""

from __future__ import annotations

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial

from kempner.run.output.console import leave, say
from kempner.run.output.logs import logger
from kempner.run.process.exit_codes import LEFT_EARLY, ExitCode, StopReason, reason_of_signal
from kempner.run.process.signals import (
    LEFT_AT_ONCE,
    ReceivedSignal,
    exit_before_training,
    inbox,
    insists,
    untouched_by_default,
)

NEARER = 1.0
"""Seconds by which a deadline must be nearer than the known one to be logged again."""


class State(Enum):
    """Which processes depend on this one, which decides how it stops."""

    ALONE = "no other process: it may exit at once"
    CONNECTED = "a supervisor, which must be told before the exit"
    IN_GROUP = "other ranks, which vote on a stop"
    LEAVING = "the process is about to exit, whatever else comes"


class ListenerTrigger(Enum):
    """Events that the listener reacts to."""

    CONNECT = "a supervisor is connected"
    JOIN = "the process group exists"
    SIGNAL = "a stop signal arrived"
    ORDER = "the supervisor, or its watch, asks for a stop with a reason"
    INSIST = "a second Ctrl-C within two seconds, without a supervisor"


class ListenerAction(Enum):
    """What the listener does next."""

    NOTHING = "nothing"
    EXIT = "exit at once with code 75: there is nothing to lose"
    TELL_AND_EXIT = "tell the supervisor, then exit with code 75"
    EXIT_AT_ONCE = "exit at once with code 130: the last commit is intact"
    REQUEST = "keep the request for the next vote"
    REQUEST_AND_TELL = "keep the request, and tell the supervisor of the signal"


TRANSITIONS: dict[tuple[State, ListenerTrigger], tuple[State, ListenerAction]] = {
    (State.ALONE, ListenerTrigger.CONNECT): (State.CONNECTED, ListenerAction.NOTHING),
    (State.ALONE, ListenerTrigger.JOIN): (State.IN_GROUP, ListenerAction.NOTHING),
    (State.ALONE, ListenerTrigger.SIGNAL): (State.LEAVING, ListenerAction.EXIT),
    (State.ALONE, ListenerTrigger.ORDER): (State.LEAVING, ListenerAction.EXIT),
    (State.ALONE, ListenerTrigger.INSIST): (State.LEAVING, ListenerAction.EXIT),
    (State.CONNECTED, ListenerTrigger.CONNECT): (State.CONNECTED, ListenerAction.NOTHING),
    (State.CONNECTED, ListenerTrigger.JOIN): (State.IN_GROUP, ListenerAction.NOTHING),
    (State.CONNECTED, ListenerTrigger.SIGNAL): (State.LEAVING, ListenerAction.TELL_AND_EXIT),
    (State.CONNECTED, ListenerTrigger.ORDER): (State.LEAVING, ListenerAction.TELL_AND_EXIT),
    (State.CONNECTED, ListenerTrigger.INSIST): (State.LEAVING, ListenerAction.TELL_AND_EXIT),
    (State.IN_GROUP, ListenerTrigger.CONNECT): (State.IN_GROUP, ListenerAction.NOTHING),
    (State.IN_GROUP, ListenerTrigger.JOIN): (State.IN_GROUP, ListenerAction.NOTHING),
    (State.IN_GROUP, ListenerTrigger.SIGNAL): (State.IN_GROUP, ListenerAction.REQUEST_AND_TELL),
    (State.IN_GROUP, ListenerTrigger.ORDER): (State.IN_GROUP, ListenerAction.REQUEST),
    (State.IN_GROUP, ListenerTrigger.INSIST): (State.LEAVING, ListenerAction.EXIT_AT_ONCE),
    (State.LEAVING, ListenerTrigger.CONNECT): (State.LEAVING, ListenerAction.NOTHING),
    (State.LEAVING, ListenerTrigger.JOIN): (State.LEAVING, ListenerAction.NOTHING),
    (State.LEAVING, ListenerTrigger.SIGNAL): (State.LEAVING, ListenerAction.NOTHING),
    (State.LEAVING, ListenerTrigger.ORDER): (State.LEAVING, ListenerAction.NOTHING),
    (State.LEAVING, ListenerTrigger.INSIST): (State.LEAVING, ListenerAction.NOTHING),
}
"""For each state and trigger, the next state and the action."""


@dataclass(frozen=True)
class StopRequest:
    """A request to stop: its reason, and optionally a `sentence`. `asked_at` and `deadline` are
    `time.monotonic` seconds; the deadline is infinite if there is none."""

    reason: StopReason
    asked_at: float
    deadline: float = math.inf
    sentence: str = ""

    def seconds_left(self, now: float) -> float | None:
        """Seconds until the deadline, negative after it; None without one."""
        return None if math.isinf(self.deadline) else self.deadline - now

    def joined_with(self, later: StopRequest) -> StopRequest:
        """This request merged with a later one: the more specific reason, the nearer deadline."""
        better = later if later.reason > self.reason else self
        nearer = min(self.deadline, later.deadline)
        return replace(better, asked_at=self.asked_at, deadline=nearer)

    def adds_to(self, earlier: StopRequest | None) -> bool:
        """Whether this has another reason, or a nearer deadline, than `earlier`."""
        if earlier is None or self.reason is not earlier.reason:
            return True
        return self.deadline < earlier.deadline - NEARER


class StopListener:
    """Traps the stop signals, and keeps the request that they or the supervisor's orders make.

    Before `join_group` no other rank depends on this process: a stop ends it at once with exit code
    75, even while it waits for peers in native code. Afterwards a stop is only a request, for the
    ranks to vote on. Methods may be called from any thread.

    `at_prompt`: the process is interactive, and a second Ctrl-C interrupts its work, but does not
    end it. `on_demand`: the program decides when to trap the signals, if ever; until then it
    handles them itself, and an order becomes a SIGTERM to it.
    """

    def __init__(self, at_prompt: bool = False, on_demand: bool = False) -> None:
        self._signals, self._lock = inbox(), threading.Lock()
        self._at_prompt, self._on_demand = at_prompt, on_demand
        self._ignored = ExitStack()
        self._has_installed = False
        self._state = State.ALONE
        self.request: StopRequest | None = None
        """The request so far, None without one."""
        self._grace = math.inf
        self._tell_of_signal: Callable[[str], None] = lambda sentence: None
        self._supervised = False
        self._last_words: Callable[[str], object] = lambda sentence: None
        self._supervisor_gone: Callable[[], bool] = lambda: False

    def install(self) -> None:
        """Trap the signals; until a supervisor or peers exist, each of them ends the process.
        Outside of the main thread Python cannot trap signals; the supervisor's orders still
        apply."""
        if not self._signals.installed:
            if threading.current_thread() is not threading.main_thread():
                logger().warning(
                    "no signal stops this loop, since it is not in the main thread; orders of the "
                    "supervisor do"
                )
                return
            self._signals.install(self._at_prompt)
            self._has_installed = True
        self._signals.react_with(self._signalled)

    def uninstall(self) -> None:
        """Restore the handlers that `install` has replaced."""
        self._ignored.close()
        if self._has_installed and threading.current_thread() is threading.main_thread():
            self._has_installed = False
            self._signals.uninstall()

    def connect(
        self,
        last_words: Callable[[str], object],
        supervisor_gone: Callable[[], bool] = lambda: False,
    ) -> None:
        """Note that a supervisor is connected. `last_words` tells it that this process exits, and
        why; it may take seconds. `supervisor_gone` returns whether the supervisor has ended."""
        self._last_words, self._supervisor_gone = last_words, supervisor_gone
        self._supervised = True
        if not (self._signals.installed or self._at_prompt or self._on_demand):
            # Slurm may also signal a rank, and so may the rank's agent until it has the connection.
            self._ignored.enter_context(untouched_by_default(signal.SIGTERM))
        with self._lock:
            self._move(ListenerTrigger.CONNECT)

    def join_group(
        self,
        grace: float | None = None,
        on_signal: Callable[[str], None] = lambda sentence: None,
    ) -> None:
        """Note that peers depend on this process: a stop becomes a request. `grace` is the seconds
        from a signal until the process is killed, None if it is not. `on_signal` is called, from a
        thread, with a sentence if a signal is the first request to stop."""
        self._grace = math.inf if grace is None else grace
        self._tell_of_signal = on_signal
        with self._lock:
            self._move(ListenerTrigger.JOIN)

    def stop(
        self, reason: StopReason, seconds_left: float | None = None, sentence: str = ""
    ) -> None:
        """Request a stop; of several requests the greatest reason and the nearest deadline
        count."""
        now = time.monotonic()
        deadline = math.inf if seconds_left is None else now + seconds_left
        self._ask(ListenerTrigger.ORDER, StopRequest(reason, now, deadline, sentence))

    def should_shutdown(self) -> bool:
        """Whether a stop was requested."""
        return self.request is not None

    def reason(self) -> StopReason:
        """Why this rank wants to stop, for its vote."""
        return StopReason.NONE if self.request is None else self.request.reason

    def sentence(self, reason: StopReason) -> str:
        """The sentence of the request if it has this `reason`; else empty."""
        request = self.request
        return request.sentence if request is not None and request.reason is reason else ""

    def seconds_left(self) -> float | None:
        """Seconds until the nearest deadline, negative after it; None without one."""
        return None if self.request is None else self.request.seconds_left(time.monotonic())

    def seconds_since_asked(self) -> float:
        """Seconds since the first request to stop; 0 without one."""
        return 0.0 if self.request is None else time.monotonic() - self.request.asked_at

    def _signalled(self, received: ReceivedSignal) -> None:
        gone = self._supervisor_gone()
        reason = reason_of_signal(received.signal, gone)
        sentence = "the supervisor has ended" if gone else received.signal.name
        deadline = received.at + self._grace
        handled_elsewhere = self._supervised or self._at_prompt  # the second Ctrl-C
        insisted = insists(self._signals.received) and not handled_elsewhere
        trigger = ListenerTrigger.INSIST if insisted else ListenerTrigger.SIGNAL
        self._ask(trigger, StopRequest(reason, received.at, deadline, sentence))

    def _ask(self, trigger: ListenerTrigger, asked: StopRequest) -> None:
        """Keep the request, and act on it without blocking the caller's thread."""
        with self._lock:
            before = self.request
            self.request = asked if before is None else before.joined_with(asked)
            action = self._move(trigger)
        match action:
            case ListenerAction.EXIT:
                exit_before_training(asked.sentence or asked.reason.words)
            case ListenerAction.TELL_AND_EXIT:
                # In a thread: the caller's may be the one that delivers the message.
                tell = partial(self._tell_and_exit, asked)
                threading.Thread(target=tell, name="exit", daemon=True).start()
            case ListenerAction.EXIT_AT_ONCE:
                say(f"kempner: {LEFT_AT_ONCE}", sys.stderr)
                leave(ExitCode.INTERRUPTED)
            case ListenerAction.REQUEST if self._on_demand and not self._signals.installed:
                # The program handles the signals itself.
                os.kill(os.getpid(), signal.SIGTERM)
            case ListenerAction.REQUEST | ListenerAction.REQUEST_AND_TELL:
                if action is ListenerAction.REQUEST_AND_TELL and before is None:
                    self._tell_of_signal(asked.sentence)
                _log_if_news(self.request, before)

    def _move(self, trigger: ListenerTrigger) -> ListenerAction:
        self._state, action = TRANSITIONS[self._state, trigger]
        return action

    def _tell_and_exit(self, asked: StopRequest) -> None:
        self._last_words(f"{LEFT_EARLY} ({asked.reason.words})")
        exit_before_training(asked.sentence or asked.reason.words)


def _log_if_news(request: StopRequest, before: StopRequest | None) -> None:
    if request.adds_to(before):
        left = request.deadline - time.monotonic()
        logger().info(
            "asked to stop",
            reason=request.reason.label,
            sentence=request.sentence,
            seconds_left=None if math.isinf(left) else round(left, 1),
        )
