"""The attempts of a run as the ledger records them, and why each ended."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from kempner.run.process.exit_codes import ExitCode, StopReason
from kempner.run.record.events import (
    AttemptEnded,
    AttemptFailed,
    AttemptStarted,
    CheckpointCommitted,
    Completed,
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
"""Events that a supervisor records before it starts the ranks again."""


@dataclass(frozen=True)
class AttemptFacts:
    """One attempt. Times are seconds since the epoch.

    `begin` is its start (for a supervisor's first attempt, the start of the supervisor), `end` when
    its last rank ended, or its last known moment; `over` says whether the ledger has its end.
    """

    number: int
    begin: float
    end: float
    over: bool
    entries: tuple[Entry[LedgerEvent], ...]

    def all(self, kind: type[E]) -> list[Entry[E]]:
        return [entry for entry in self.entries if isinstance(entry.event, kind)]  # type: ignore[misc]

    def first(self, kind: type[E]) -> Entry[E] | None:
        return next(iter(self.all(kind)), None)

    def last(self, kind: type[E]) -> Entry[E] | None:
        return next(reversed(self.all(kind)), None)

    @property
    def started(self) -> AttemptStarted:
        """How it was started; with one rank if the ledger does not say."""
        found = self.first(AttemptStarted)
        return AttemptStarted(ranks=1) if found is None else found.event

    @property
    def ended(self) -> AttemptEnded | None:
        """How its ranks ended; None if that is not recorded."""
        found = self.last(AttemptEnded)
        return None if found is None else found.event

    @property
    def ready_at(self) -> float | None:
        """When rank 0 began with the first step; None if it never did."""
        for kind in (RankReady, Resumed, StartedAnew):
            if (entry := self.first(kind)) is not None:
                return min(max(entry.time, self.begin), self.end)
        return None

    @property
    def load_seconds(self) -> float:
        """Seconds that rank 0 spent loading, until `ready_at`; 0 if unknown."""
        entry = self.first(RankReady)
        reached = {} if entry is None else entry.event.reached
        return max(0.0, reached.get("compile", 0.0) - reached.get("load", math.inf))

    @property
    def first_step(self) -> int | None:
        """The step that it resumed from; None if it never got so far, or does not say."""
        for kind in (RankReady, Resumed):
            if (entry := self.first(kind)) is not None:
                return int(entry.event.step)  # type: ignore[attr-defined]
        return None if self.first(StartedAnew) is None else 0

    @property
    def failed_at(self) -> float | None:
        if self.ended is None or self.ended.seconds is None:
            return None
        return max(self.begin, self.end - self.ended.seconds)

    @property
    def known_step(self) -> int:
        """The last step that was certainly made, by the ledger alone."""
        known = [self.first_step or 0, *(e.event.step - 1 for e in self.all(AttemptFailed))]
        for e in self.entries:
            if isinstance(e.event, CheckpointCommitted | Stopped | Completed | ProgramAdvanced):
                known.append(e.event.step or 0)
        return max(known)

    @property
    def reports_nothing(self) -> bool:
        """Whether it is a user's own program that did not report its first step."""
        return self.started.own_program and self.ready_at is None

    @property
    def in_order(self) -> bool:
        """Whether its ranks left on request, or because they were done."""
        return any(
            isinstance(e.event, Stopped | Completed | StopRequested | Signalled)
            for e in self.entries
        )

    @property
    def stopped(self) -> bool:
        """Whether its ranks reported that they stopped, to continue later."""
        return self.first(Stopped) is not None

    @property
    def completed(self) -> bool:
        """Whether the run's last step was made and saved, by an event or by the exit code."""
        if self.left_at is not None:
            return False
        by_exit = self.ended is not None and self.ended.code == ExitCode.COMPLETED
        conclusive = self.started.own_program or not self.stop_reason
        return self.first(Completed) is not None or (by_exit and conclusive)

    @property
    def left_at(self) -> int | None:
        """The step after which a program left its own loop early; None if it did not."""
        return None if self.ended is None else self.ended.left_at

    @property
    def stop_reason(self) -> StopReason:
        found = [
            e.event.reason for e in self.entries if isinstance(e.event, StopRequested | Stopped)
        ]
        return max(map(StopReason.of_label, found), default=StopReason.NONE)

    @property
    def given_up(self) -> Entry[RunGivenUp] | None:
        return self.first(RunGivenUp)

    @property
    def requeued_at(self) -> float | None:
        """When its job was requeued, or resubmitted as another one."""
        times = [e.time for e in self.entries if isinstance(e.event, Requeued | Resubmitted)]
        return min(times, default=None)

    @property
    def restarted(self) -> bool:
        return any(isinstance(entry.event, _RESTARTS) for entry in self.entries)

    def hang(self) -> Entry[HangFound] | None:
        return self.first(HangFound)

    def storage_waits(self) -> list[tuple[float, float]]:
        """Begin and end of each wait for storage, by any rank or the supervisor."""
        return [(e.time - e.event.seconds, e.time) for e in self.all(StorageWaited)]


def attempts_of(history: RunHistory, last_steps: Mapping[int, float]) -> list[AttemptFacts]:
    """The attempts in the order in which they began.

    `last_steps` has the time of each attempt's last logged step, in seconds since the epoch.
    """
    found: defaultdict[int, list[Entry[LedgerEvent]]] = defaultdict(list)
    for entry in history.entries(LedgerEvent):
        if not math.isfinite(entry.time):
            continue
        found[entry.attempt].append(entry)
    attempts = [_attempt(n, e, last_steps.get(n)) for n, e in found.items() if n > 0]
    ordered = sorted(attempts, key=lambda attempt: (attempt.begin, attempt.number))
    for place, attempt in enumerate(ordered):
        before = ordered[place - 1].end if place else -math.inf
        began = attempt.started.process_began
        # A supervisor's first attempt begins with its process, which first examines the nodes.
        if began is not None and before <= began < attempt.begin:
            ordered[place] = replace(attempt, begin=began)
    return ordered


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
    FAILURE = "failure"
    HANG = "hang"
    STOP = "stop"
    SILENT = "no message"

    @property
    def is_failure(self) -> bool:
        return self is not InterruptionKind.STOP


class EndCause(NamedTuple):
    """Why an attempt ended: `cause` is a sentence, `detail` what else is known. `rank` failed
    first, on `node`, if one did."""

    kind: InterruptionKind
    cause: str
    detail: str
    rank: int | None
    node: str


def cause_of(facts: AttemptFacts) -> EndCause:
    found, hang = facts.last(AttemptFailed), facts.hang()
    failed = None if found is None else found.event
    reason = "" if facts.ended is None else facts.ended.reason
    rank = None if facts.ended is None else facts.ended.culprit
    node = "" if failed is None else failed.node
    if hang is not None:
        kind, cause, detail = InterruptionKind.HANG, "nothing moved any more", hang.event.reason
    elif facts.stop_reason.ends_run or (facts.in_order and failed is None):
        stopped, words = facts.last(Stopped), facts.stop_reason.words
        sentence = "" if stopped is None else stopped.event.sentence
        kind, cause, detail = (
            InterruptionKind.STOP,
            f"stopped: {words}",
            "" if sentence == words else sentence,
        )
        rank = None
    elif failed is not None or reason:
        raised = "" if failed is None else failed.raised
        kind, cause = InterruptionKind.FAILURE, reason or "a rank failed"
        detail = "" if raised in reason else raised
    else:
        kind, cause = InterruptionKind.SILENT, "the supervisor ended without a message"
        detail = ""
    return EndCause(kind, cause, detail, rank, node)
