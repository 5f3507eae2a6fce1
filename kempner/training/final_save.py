"""Decides about the final save before exiting: a pure function, called again after each action."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

EXIT_SECONDS = 2.0
"""Seconds before the deadline that are reserved for the final barrier and the exit."""

BREATH = 1.0
"""Most seconds that the ranks pause before they check the deadline again."""


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
    """The situation of the ranks; times in seconds, None without a deadline, save or measurement.

    `step` is the last completed step, `committed` that of the last commit, `warned_for` the time
    since the stop request, `seconds_left` the time until the deadline. A save may start in
    `next_try` seconds; None if no further one makes sense. `suspicious`: the loss of the last step
    is too bad to save the state.
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
    """The next `action`, and why; `patience` is the most seconds to WAIT or PAUSE, None without
    limit. `lost` steps are not committed so far; a warning of `enough` seconds would have saved
    them, None if unknown."""

    action: Action
    reason: str
    lost: int
    patience: float | None = None
    enough: float | None = None


def decide_final_save(now: SaveSituation) -> SaveDecision:
    """Wait while there is time; start the last save only if a save usually fits.

    Waiting for a save in flight until the deadline is always right: it does not touch the last
    commit, and nothing else can be saved meanwhile. If no save was measured yet, one is tried.
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
    """Whether there is `time` for a save, and whether to `pause` first."""
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
    """Seconds left without `EXIT_SECONDS`; None without a deadline."""
    return None if seconds_left is None else seconds_left - EXIT_SECONDS


def tell_loss(move: SaveDecision) -> str:
    """A sentence: what ABANDON or DISCARD cost, and what would have helped."""
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
    """Seconds from the request to the exit: the time so far, and what the saves still need."""
    in_flight, times = now.in_flight, now.save_times
    if times is None or (in_flight is not None and in_flight.age > times.long):
        return None
    rest = 0.0 if in_flight is None else times.long - in_flight.age
    last = 0.0 if in_flight is not None and in_flight.step == now.step else times.long
    return now.warned_for + rest + last + EXIT_SECONDS
