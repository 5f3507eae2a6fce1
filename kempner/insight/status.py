"""Where a run stands, from what it left on disk."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kempner.checkpoint.layout import CheckpointFolder
from kempner.run.layout import RunDirectory
from kempner.run.ledger import read_lines


@dataclass(frozen=True)
class Status:
    """A run at a glance; what is not known is None."""

    state: str
    step: int | None
    loss: float | None
    latest_checkpoint: int | None
    attempts: int
    last_event: str | None


def summarise(
    events: Iterable[Mapping[str, Any]],
    metrics: Iterable[Mapping[str, Any]],
    latest_checkpoint: int | None,
) -> Status:
    """Condense ledger and metrics."""
    attempts, last, state = 0, None, "not started"
    for event in events:
        last = event["event"]
        if last == "attempt_started":
            attempts, state = attempts + 1, "running, or ended without a word"
        elif last in ("stopped", "completed"):
            state = last
        elif last == "attempt_ended" and event.get("reason"):
            state = event["reason"]
    step, loss = None, None
    for line in metrics:
        if "loss" in line:
            step, loss = line["step"], line["loss"]
    return Status(state, step, loss, latest_checkpoint, attempts, last)


def read_status(run: RunDirectory) -> Status:
    """The status of the run in a directory."""
    latest = CheckpointFolder(run.checkpoints).latest()
    return summarise(read_lines(run.ledger), read_lines(run.metrics), latest)
