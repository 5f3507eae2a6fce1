"""What is known of a run at one moment, before anything is concluded from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kempner.insight.status.job import JobStatus
from kempner.run.record.gave_up import GaveUp
from kempner.run.record.history import RunHistory


@dataclass(frozen=True)
class RankPlace:
    """Where a rank is, as its supervisor last heard. `worked` and `waited` are seconds of its
    attempt, as in `Report`; `waiting` and `storage` are what it waits for, empty if it does not.
    """

    rank: int
    step: int
    phase: str
    worked: float = 0.0
    waited: float = 0.0
    waiting: str = ""
    storage: str = ""


@dataclass(frozen=True)
class CheckpointFacts:
    """The newest checkpoint, committed at `time` (Unix, seconds), None if that is not known.

    `damaged` is how many files a full verification found damaged at `verified_at`.
    """

    step: int
    time: float | None = None
    verified_at: float | None = None
    damaged: int = 0
    loaded: bool = False
    """Whether the run went on from it: then every byte that the ranks needed was checked."""


@dataclass(frozen=True)
class LiveState:
    """Whether a run has an owner (`alive`, None if that cannot be seen), the number of the live
    `attempt`, the last one that was begun, and where its ranks are.
    """

    alive: bool | None = None
    attempt: int | None = None
    ranks: Sequence[RankPlace] = ()


@dataclass(frozen=True)
class Metrics:
    """The last `lines` of the metrics, and `train.max_steps`."""

    lines: Sequence[Mapping[str, Any]] = ()
    total_steps: int | None = None


@dataclass(frozen=True)
class RunFacts:
    """A run at `now`, in seconds since the epoch; what is not known is None.

    `history` may begin in the middle of the run. `job` is what Slurm says. `unread` are sentences
    on what could not be read now.
    """

    now: float
    history: RunHistory = field(default_factory=RunHistory)
    live: LiveState = LiveState()
    metrics: Metrics = Metrics()
    checkpoint: CheckpointFacts | None = None
    job: JobStatus | None = None
    gave_up: GaveUp | None = None
    unread: Sequence[str] = ()
