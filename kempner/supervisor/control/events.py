"""Events that the supervisor receives about its ranks, from any source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from kempner.run.control.protocol import Event, Outcome, Report


@dataclass(frozen=True)
class Connected:
    """A rank is there, for the first time or again."""

    rank: int
    host: str
    pid: int


@dataclass(frozen=True)
class Disconnected:
    """A rank's connection is over. It may come back.

    `hung_up` says that the rank's side closed it, as the end of a process does; a cut does not.
    """

    rank: int
    reason: str
    hung_up: bool = False


@dataclass(frozen=True)
class RankMessage:
    """A rank said something that must not be lost."""

    rank: int
    message: Event | Outcome


@dataclass(frozen=True)
class LastReport:
    """A rank's newest report, and when it came (`time.monotonic`, seconds)."""

    report: Report
    at: float


News: TypeAlias = Connected | Disconnected | RankMessage
