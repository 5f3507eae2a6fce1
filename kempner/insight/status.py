"""State of a run, from its files on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.run.process.stop_reason import StopReason
from kempner.run.record import gave_up
from kempner.run.record.attempts import read_current
from kempner.run.record.events.attempt import AttemptEnded, AttemptStarted
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.events.stop import Completed, Stopped, StopRequested
from kempner.run.record.gave_up import GaveUp
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import is_owned
from kempner.run.record.ledger import read_lines
from kempner.run.record.recorded_config import checkpoint_folder
from kempner.run.record.run_dir import RunDirectory

UNSETTLED = "running, or ended without a message"
"""The state of a run whose ledger says no more: its lease has to tell."""


@dataclass(frozen=True)
class Status:
    """A run at a glance; what is not known is None."""

    state: str
    step: int | None
    loss: float | None
    latest_checkpoint: int | None
    attempts: int
    last_event: str | None
    ranks: tuple[tuple[str, str], ...] = ()
    """Who is where, as last heard: names of ranks, and their step and phase."""
    gave_up: GaveUp | None = None
    """Why the run is not to be started again before a person has done something."""


def summarise(
    history: RunHistory,
    metrics: Iterable[Mapping[str, Any]],
    latest_checkpoint: int | None,
) -> Status:
    """Condense history and metrics."""
    attempts, last, state = 0, None, "not started"
    for event in history.events(LedgerEvent):
        last = event.name
        match event:
            case AttemptStarted():
                attempts, state = attempts + 1, UNSETTLED
            case StopRequested():
                state = f"asked to stop{_why(event)}"
            case Stopped():
                state = f"{event.name}{_why(event)}"
            case Completed():
                state = event.name
            case AttemptEnded() if event.reason:
                state = event.reason
    step, loss = None, None
    for line in metrics:
        if "loss" in line:
            step, loss = line["step"], line["loss"]
    return Status(state, step, loss, latest_checkpoint, attempts, last)


def _why(event: StopRequested | Stopped) -> str:
    """The reason of a stop in brackets."""
    reason = StopReason.of_label(event.reason)
    return f" ({reason.words})" if reason else ""


def gather(ranks: Iterable[Mapping[str, Any]]) -> tuple[tuple[str, str], ...]:
    """Ranks in the same place together: thousands of them must fit on a screen."""
    together: dict[tuple[int, str, str], list[int]] = {}
    for rank in ranks:
        place = (rank["step"], rank["phase"], rank.get("storage", ""))
        together.setdefault(place, []).append(rank["rank"])
    return tuple(
        (_name(sorted(members)), f"step {step}, {phase}{_waiting_for(storage)}")
        for (step, phase, storage), members in sorted(together.items())
    )


def _waiting_for(storage: str) -> str:
    return f", waiting for storage: {storage}" if storage else ""


def _name(ranks: Sequence[int]) -> str:
    """`rank 3`, or `ranks 0-6, 9` for several, in ascending order."""
    return f"rank{'s' if len(ranks) > 1 else ''} {spans(ranks)}"


def spans(numbers: Iterable[int]) -> str:
    """Ascending numbers with neighbours drawn together: "0-2, 5"."""
    runs = []
    for _, group in groupby(enumerate(numbers), key=lambda pair: pair[1] - pair[0]):
        run = [number for _, number in group]
        runs.append(f"{run[0]}-{run[-1]}" if run[1:] else str(run[0]))
    return ", ".join(runs)


def read_status(run: RunDirectory, history: RunHistory) -> Status:
    """The status of the run in a directory, which has this history."""
    status = summarise(history, read_lines(run.metrics), _latest_checkpoint(run, history))
    state = _by_lease(run) if status.state == UNSETTLED else status.state
    return replace(status, state=state, ranks=gather(_read_ranks(run)), gave_up=gave_up.read(run))


def _by_lease(run: RunDirectory) -> str:
    """Whether a run goes on of whose end the ledger has no word."""
    try:
        return "running" if is_owned(run.supervisors) else "ended without a message"
    except FileNotFoundError:
        return "ended without a message"
    except OSError:
        return UNSETTLED


def _latest_checkpoint(run: RunDirectory, history: RunHistory) -> int | None:
    """By its link; by the ledger where that cannot be seen from here, or not now."""
    folder = CheckpointFolder(checkpoint_folder(run))
    try:
        return folder.latest() if folder.path.exists() else history.last_step
    except OSError:
        return history.last_step


def _read_ranks(run: RunDirectory) -> list[dict[str, Any]]:
    """What the supervisor of the live attempt last heard; nothing without a supervisor."""
    attempt = read_current(run.attempts)
    if attempt is None:
        return []
    try:
        ranks: list[dict[str, Any]] = json.loads(run.ranks(attempt.number).read_bytes())
    except FileNotFoundError:
        return []
    return ranks
