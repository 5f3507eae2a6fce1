"""The attempts of a run, each with what the ledger tells of it.

Why an attempt ended, from what the ledger tells of it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TypeVar

from kempner.run.process.exit_codes import ExitCode
from kempner.run.process.stop_reason import StopReason
from kempner.run.record.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    Completed,
    Evaluated,
    HangFound,
    LedgerEvent,
    NodesJoined,
    NodesLeft,
    NodesTakenBack,
    ProgramAdvanced,
    RankReady,
    Requeued,
    Restarting,
    Resubmitted,
    Resumed,
    RolledBack,
    RunGivenUp,
    Signalled,
    StartedAnew,
    Stopped,
    StopRequested,
    StorageWaited,
)
from kempner.run.record.history import Entry, RunHistory

E = TypeVar("E", bound=LedgerEvent)


_RESTARTS = Restarting, NodesTakenBack, NodesJoined, NodesLeft
"""What a supervisor says before it starts the ranks again."""


@dataclass(frozen=True)
class AttemptFacts:
    """One attempt. Times are seconds since the epoch.

    `begin` is when it was begun, the first of a supervisor with that, `end` when its last rank was
    gone, or the last that is known of it; `over` is whether the ledger says that it has ended.
    """

    number: int
    begin: float
    end: float
    over: bool
    entries: tuple[Entry[LedgerEvent], ...]

    def all(self, kind: type[E]) -> list[Entry[E]]:
        """Its events of one kind, in their order."""
        return [entry for entry in self.entries if isinstance(entry.event, kind)]  # type: ignore[misc]

    def first(self, kind: type[E]) -> Entry[E] | None:
        """The first event of one kind."""
        return next(iter(self.all(kind)), None)

    def last(self, kind: type[E]) -> Entry[E] | None:
        """The last event of one kind."""
        return next(reversed(self.all(kind)), None)

    @property
    def started(self) -> AttemptStarted:
        """How it was started; of one rank, if the ledger has lost that."""
        found = self.first(AttemptStarted)
        return AttemptStarted(ranks=1) if found is None else found.event

    @property
    def ready_at(self) -> float | None:
        """When rank 0 began with the first step; None if it never did."""
        for kind in (RankReady, Resumed, StartedAnew):
            if (entry := self.first(kind)) is not None:
                return min(max(entry.time, self.begin), self.end)
        return None

    @property
    def load_seconds(self) -> float:
        """How long before that rank 0 had met the others and begun to load; 0 if unknown."""
        entry = self.first(RankReady)
        reached = {} if entry is None else entry.event.reached
        return max(0.0, reached.get("compile", 0.0) - reached.get("load", math.inf))

    @property
    def first_step(self) -> int | None:
        """The step that it goes on from; None if it never came so far, or does not say."""
        for kind in (RankReady, Resumed):
            if (entry := self.first(kind)) is not None:
                return int(entry.event.step)  # type: ignore[attr-defined]
        return None if self.first(StartedAnew) is None else 0

    @property
    def failed_at(self) -> float | None:
        """When its first rank ended; None if that is not known."""
        entry = self.last(AttemptEnded)
        if entry is None or entry.event.seconds is None:
            return None
        return max(self.begin, self.end - entry.event.seconds)

    @property
    def known_step(self) -> int:
        """The last step that was made for sure, by the ledger alone."""
        known = [self.first_step or 0]
        known += [e.event.step for e in self.all(CheckpointCommitted)]
        known += [e.event.step for e in self.all(Stopped)]
        known += [e.event.step for e in self.all(Completed)]
        known += [e.event.step - 1 for e in self.all(AttemptFailed)]
        known += [e.event.step for e in self.all(ProgramAdvanced) if e.event.step is not None]
        return max(known)

    @property
    def reports_nothing(self) -> bool:
        """Whether it is a program that did not say when it began with its first step."""
        return self.started.own_program and self.ready_at is None

    @property
    def in_order(self) -> bool:
        """Whether its ranks left because they were asked to, or were done."""
        return any(
            isinstance(e.event, Stopped | Completed | StopRequested | Signalled)
            for e in self.entries
        )

    @property
    def stopped(self) -> bool:
        """Whether its ranks said that they leave, to go on later."""
        return self.first(Stopped) is not None

    @property
    def completed(self) -> bool:
        """Whether the run's last step was made and saved, by an event or else by the exit code."""
        ended, said = self.last(AttemptEnded), self.started.own_program or not self.stop_reason
        by_exit = ended is not None and ended.event.code == ExitCode.COMPLETED
        if self.left_at is not None:
            return False
        return self.first(Completed) is not None or (by_exit and said)

    @property
    def left_at(self) -> int | None:
        """The step after which a program left its own loop early; None if it did not."""
        ended = self.last(AttemptEnded)
        return None if ended is None else ended.event.left_at

    @property
    def stop_reason(self) -> StopReason:
        """Why it was stopped; NONE if it was not."""
        found = [
            e.event.reason for e in self.entries if isinstance(e.event, StopRequested | Stopped)
        ]
        return max(map(StopReason.of_label, found), default=StopReason.NONE)

    @property
    def given_up(self) -> Entry[RunGivenUp] | None:
        """Whether kempner gave up after it."""
        return self.first(RunGivenUp)

    @property
    def requeued_at(self) -> float | None:
        """When its job went back into the queue, or another job took its place."""
        times = [e.time for e in self.entries if isinstance(e.event, Requeued | Resubmitted)]
        return min(times, default=None)

    @property
    def restarted(self) -> bool:
        """Whether the same supervisor started the ranks again."""
        return any(isinstance(entry.event, _RESTARTS) for entry in self.entries)

    def hang(self) -> Entry[HangFound] | None:
        """What it was ended for, if nothing moved any more."""
        return self.first(HangFound)

    def evaluations(self) -> list[Entry[Evaluated]]:
        return self.all(Evaluated)

    def rollbacks(self) -> list[Entry[RolledBack]]:
        """When it went back to a checkpoint by itself."""
        return self.all(RolledBack)

    def storage_waits(self) -> list[tuple[float, float]]:
        """Begin and end of each wait for storage, by any rank or the supervisor."""
        return [(e.time - e.event.seconds, e.time) for e in self.all(StorageWaited)]


def attempts_of(history: RunHistory, last_steps: Mapping[int, float]) -> list[AttemptFacts]:
    """The attempts in the order in which they began.

    `last_steps` says when each attempt has logged a step last, in seconds since the epoch.
    """
    found: defaultdict[int, list[Entry[LedgerEvent]]] = defaultdict(list)
    for entry in history.entries(LedgerEvent):
        if not math.isfinite(entry.time):
            continue
        found[entry.attempt].append(entry)
    attempts = [_attempt(n, e, last_steps.get(n)) for n, e in found.items() if n > 0]
    ordered = sorted(attempts, key=lambda attempt: (attempt.begin, attempt.number))
    return [_with_supervisor(a, b) for a, b in zip(ordered, [None, *ordered], strict=False)]


def _with_supervisor(attempt: AttemptFacts, before: AttemptFacts | None) -> AttemptFacts:
    """The first attempt of a supervisor begins with its process; that looks at the nodes first."""
    began = attempt.started.process_began
    if began is None or began >= attempt.begin or (before is not None and began < before.end):
        return attempt
    return replace(attempt, begin=began)


def _attempt(
    number: int, entries: Sequence[Entry[LedgerEvent]], last_step: float | None
) -> AttemptFacts:
    begun = [e.time for e in entries if isinstance(e.event, AttemptStarted)]
    begin = min(begun) if begun else entries[0].time
    ended = [e.time for e in entries if isinstance(e.event, AttemptEnded)]
    if ended:
        end = ended[-1]
    else:
        within = [e.time for e in entries if not isinstance(e.event, Requeued | Resubmitted)]
        end = max([begin, *within, *([] if last_step is None else [last_step])])
    return AttemptFacts(number, begin, max(begin, end), bool(ended), tuple(entries))


class InterruptionKind(StrEnum):
    """What sort of interruption it is."""

    FAILURE = "failure"
    HANG = "hang"
    STOP = "stop"
    SILENT = "no message"

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong, other than a stop that was asked for."""
        return self is not InterruptionKind.STOP


def cause_of(facts: AttemptFacts) -> tuple[InterruptionKind, str, str]:
    """What sort it is, the cause in one sentence, and what else is known."""
    ended, failed, hang = facts.last(AttemptEnded), facts.last(AttemptFailed), facts.hang()
    reason = "" if ended is None else ended.event.reason
    if hang is not None:
        return InterruptionKind.HANG, "nothing moved any more", hang.event.reason
    if facts.stop_reason.ends_run or (facts.in_order and failed is None):
        stopped = facts.last(Stopped)
        words = facts.stop_reason.words
        detail = "" if stopped is None else stopped.event.sentence
        return InterruptionKind.STOP, f"stopped: {words}", detail if detail != words else ""
    if failed is not None or reason:
        raised = "" if failed is None else failed.event.raised
        return (
            InterruptionKind.FAILURE,
            reason or "a rank failed",
            "" if raised in reason else raised,
        )
    return InterruptionKind.SILENT, "the supervisor ended without a message", ""
