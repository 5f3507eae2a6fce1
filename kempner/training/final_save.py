"""Whether to make the final save before exiting: a pure choice, made anew after each action."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

EXIT_SECONDS = 2.0
"""What is kept free at the end of a deadline, for the goodbye of the ranks and their exit."""

BREATH = 1.0
"""Seconds that the ranks pause at most before they look at the deadline again."""


class Action(Enum):
    """The next thing to do."""

    WAIT = "wait for the save in flight"
    SAVE = "start the last save"
    PAUSE = "leave storage alone for a moment"
    DONE = "exit, everything is committed"
    FAIL = "exit, the last save could not be written"
    ABANDON = "exit, the last commit stays as it is"
    DISCARD = "exit, the state is not worth keeping"


@dataclass(frozen=True)
class SaveInFlight:
    """A save under way: the step whose state it writes, and its age in seconds."""

    step: int
    age: float


@dataclass(frozen=True)
class SaveTimes:
    """Seconds of the last saves: their median, and their 95th percentile."""

    usual: float
    long: float


@dataclass(frozen=True)
class SaveSituation:
    """Where the ranks stand. Seconds; None where there is no deadline, save or measurement.

    `step` steps are done, `committed` is the step of the last commit, `warned_for` the time since
    the stop was asked for, `seconds_left` what is left until the deadline, `next_try` in how many
    seconds a save may be started, None if none is worth it any more, `suspicious` whether the last
    step had a loss that no state should be kept after.
    """

    step: int
    committed: int | None
    in_flight: SaveInFlight | None
    save_times: SaveTimes | None
    warned_for: float
    seconds_left: float | None
    next_try: float | None
    suspicious: bool


@dataclass(frozen=True)
class SaveDecision:
    """`action`, and why; `patience` is how many seconds to WAIT or PAUSE at most, None for ever.
    `lost` steps are not committed as things stand; `enough` is how many seconds of warning would
    have saved them, None if that cannot be told."""

    action: Action
    reason: str
    lost: int
    patience: float | None = None
    enough: float | None = None


def decide_final_save(now: SaveSituation) -> SaveDecision:
    """Wait while there is time; start the last save only if a save usually fits.

    A save in flight is worth waiting for until the deadline: the last commit is not touched by it,
    and nothing else can be saved meanwhile. So one slow save is no reason not to try. Before any
    save was measured, one is tried.
    """
    time = time_to_spare(now.seconds_left)
    lost = now.step - (now.committed or 0)
    if now.in_flight is not None:
        if time is None or time > 0:
            return SaveDecision(Action.WAIT, "a save is in flight", lost, patience=time)
        return _abandon(now, "the save in flight did not finish in time")
    if lost == 0:
        return SaveDecision(Action.DONE, "the last step is committed", lost)
    if now.suspicious:
        return SaveDecision(Action.DISCARD, "the loss diverged at the end", lost)
    if now.next_try is None:
        return SaveDecision(Action.FAIL, "the last step could not be saved", lost)
    return _save_or_pause(now, time, now.next_try, lost)


def _save_or_pause(now: SaveSituation, time: float | None, pause: float, lost: int) -> SaveDecision:
    """Of a state that is to be saved: whether there is `time`, and whether it is time."""
    usual = now.save_times.usual if now.save_times else 0.0
    if pause > 0 and (time is None or pause + usual < time):
        return SaveDecision(Action.PAUSE, "a save has failed", lost, patience=min(pause, BREATH))
    if time is None:
        return SaveDecision(Action.SAVE, "there is no deadline", lost)
    if time <= 0:
        return _abandon(now, "no time was left to save")
    if now.save_times is None:
        return SaveDecision(Action.SAVE, "no save was measured yet, so it is tried", lost)
    if usual <= time:
        return SaveDecision(Action.SAVE, f"a save takes {usual:.1f} s of {time:.1f} s left", lost)
    return _abandon(now, f"a save takes {usual:.1f} s and {time:.1f} s were left for it")


def time_to_spare(seconds_left: float | None) -> float | None:
    """What is left of a deadline when the exit's share is kept free; None without a deadline."""
    return None if seconds_left is None else seconds_left - EXIT_SECONDS


def tell_loss(move: SaveDecision) -> str:
    """What ABANDON or DISCARD cost and what would have helped, for a person."""
    steps = "step is" if move.lost == 1 else f"{move.lost} steps are"
    if move.action is Action.DISCARD:
        advice = "the next start repeats them"
    elif move.enough is None:
        advice = "the duration of a save is not known yet"
    else:
        advice = f"a warning of {math.ceil(move.enough)} s would have been enough"
    return f"the last {steps} lost, because {move.reason}; {advice}"


def _abandon(now: SaveSituation, reason: str) -> SaveDecision:
    lost = now.step - (now.committed or 0)
    return SaveDecision(Action.ABANDON, reason, lost, enough=_enough(now))


def _enough(now: SaveSituation) -> float | None:
    """From the request to the exit: what was spent so far, and what the saves still need."""
    in_flight, times = now.in_flight, now.save_times
    if times is None or (in_flight is not None and in_flight.age > times.long):
        return None
    rest = 0.0 if in_flight is None else times.long - in_flight.age
    last = 0.0 if in_flight is not None and in_flight.step == now.step else times.long
    return now.warned_for + rest + last + EXIT_SECONDS
