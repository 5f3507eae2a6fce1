"""State of a run, from its files on disk."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any

from kempner.checkpoint.format.names import CheckpointFolder
from kempner.insight.progress import Progress, measure
from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.stop_reason import StopReason
from kempner.run.record import gave_up
from kempner.run.record.events.attempt import AttemptEnded, AttemptStarted
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.events.stop import Completed, Stopped, StopRequested
from kempner.run.record.gave_up import GaveUp
from kempner.run.record.history import RunHistory
from kempner.run.record.lease import is_owned
from kempner.run.record.ledger import read_lines
from kempner.run.record.recorded_config import checkpoint_folder, live_attempt, total_steps
from kempner.run.record.run_dir import RunDirectory

UNSETTLED = "running, or ended without a message"
"""The state of a run whose ledger says no more: its lease has to tell."""

DEAD = "ended without a message"
"""The state of one that nobody owns: it was killed, or its machine is gone."""


@dataclass(frozen=True)
class Status:
    """A run at a glance; what is not known is None."""

    state: str
    progress: Progress
    latest_checkpoint: int | None
    attempts: int
    alive: bool | None = None
    """Whether somebody owns the run; None if that cannot be seen now."""
    ranks: tuple[tuple[str, str], ...] = ()
    """Who is where, as last heard, while the run goes on: names of ranks, and their step and phase.
    """
    gave_up: GaveUp | None = None
    """Why the run is not to be started again before a person has done something."""


def summarise(
    history: RunHistory,
    metrics: Iterable[Mapping[str, Any]],
    latest_checkpoint: int | None,
    alive: bool | None = None,
    total: int | None = None,
) -> Status:
    """Condense history and metrics; `total` is the number of steps of the whole run."""
    attempts, state, over = 0, "not started", True
    for event in history.events(LedgerEvent):
        match event:
            case AttemptStarted():
                attempts, state, over = attempts + 1, UNSETTLED, False
            case StopRequested():
                state, over = f"asked to stop{_why(event)}", False
            case Stopped():
                state, over = f"{event.name}{_why(event)}", True
            case Completed():
                state, over = event.name, True
            case AttemptEnded() if event.reason:
                state, over = event.reason, event.code in (ExitCode.COMPLETED, ExitCode.STOPPED)
                over = over or not alive
    state = _by_lease(state, over, alive)
    return Status(state, measure(metrics, total), latest_checkpoint, attempts, alive)


def _by_lease(state: str, over: bool, alive: bool | None) -> str:
    """The state, by what the ledger says, whether that is an end, and whether the run is owned."""
    if alive is None or over:
        return state
    if state == UNSETTLED:
        return "running" if alive else DEAD
    if state.startswith("asked to stop"):
        return state if alive else f"{state}, and {DEAD}"
    return f"running; the last attempt: {state}"


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
    """The status of the run in a directory, which has this history.

    Raises `OSError` if a file cannot be read now.
    """
    latest, alive = _latest_checkpoint(run, history), _is_alive(run)
    status = summarise(history, read_lines(run.metrics), latest, alive, total_steps(run))
    ranks = gather(_read_ranks(run, history)) if alive else ()
    return replace(status, ranks=ranks, gave_up=gave_up.read(run))


def _is_alive(run: RunDirectory) -> bool | None:
    try:
        return is_owned(run.supervisors)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None


def _latest_checkpoint(run: RunDirectory, history: RunHistory) -> int | None:
    """By its link; by the ledger where that cannot be seen from here, or not now."""
    folder = CheckpointFolder(checkpoint_folder(run))
    try:
        return folder.latest() if folder.path.exists() else history.last_step
    except OSError:
        return history.last_step


def _read_ranks(run: RunDirectory, history: RunHistory) -> list[dict[str, Any]]:
    """What the supervisor of the live attempt last heard; nothing between two attempts."""
    attempt = live_attempt(run)
    ended = {entry.attempt for entry in history.entries(AttemptEnded)}
    if attempt is None or attempt.number in ended:
        return []
    try:
        found = json.loads(run.ranks(attempt.number).read_bytes())
    except (FileNotFoundError, ValueError):  # not written yet
        return []
    places = found if isinstance(found, list) else []
    return [place for place in places if isinstance(place, dict) and place.keys() >= _PLACE]


_PLACE = {"rank", "step", "phase"}
