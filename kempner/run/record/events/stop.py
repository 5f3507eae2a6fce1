"""Events of a stop, and of the end of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

from kempner.run.record.events.base import LedgerEvent, Sentence


@dataclass(frozen=True)
class StopRequested(LedgerEvent):
    """By the supervisor: when it asks the ranks to stop, and again if less time is left or the
    reason is better known."""

    name: ClassVar[str] = "stop_requested"
    reason: Annotated[str, "why: a `StopReason`, such as `time_limit`"]
    sentence: Sentence
    seconds_left: Annotated[float, "seconds until the ranks are killed"]


@dataclass(frozen=True)
class Signalled(LedgerEvent):
    """By rank 0: when a signal asks the ranks to stop before the supervisor does.

    In a preemption Slurm signals the ranks alone, and only the supervisor can ask how long it
    gives.
    """

    name: ClassVar[str] = "signalled"


@dataclass(frozen=True)
class Stopped(LedgerEvent):
    """By rank 0: when the ranks leave before the last step, to go on from there later."""

    name: ClassVar[str] = "stopped"
    step: Annotated[int, "last step that was made"]
    reason: Annotated[str, "why: a `StopReason`, such as `time_limit`"]
    lost_steps: Annotated[int, "steps made since the last commit, to be made again"]
    sentence: Annotated[str, "more of the reason, for a person to read"] = ""


@dataclass(frozen=True)
class Completed(LedgerEvent):
    """By rank 0: when the last step is made and saved."""

    name: ClassVar[str] = "completed"
    step: Annotated[int, "last step that was made"]


@dataclass(frozen=True)
class Left(LedgerEvent):
    """By rank 0: when the program leaves its loop before the last step, of its own accord.

    The run is not complete: it goes on when the program is started again.
    """

    name: ClassVar[str] = "left"
    step: Annotated[int, "last step that was made"]
    steps: Annotated[int, "how many there are"]
