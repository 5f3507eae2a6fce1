"""Decides whether to restart the ranks after a failure: a pure function of the history.

Progress is what counts. A run that commits a new step between two failures may fail any number of
times; kempner soon gives up on one that commits nothing.

Decides whether to restart the ranks after storage failed: a pure function of the history.

That it failed again within seconds proves nothing. What counts is for how long it has, since the
first failure after which nothing new was saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile

from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events import AttemptFailed, ProgramAdvanced, RunGivenUp
from kempner.run.record.history import Entry, RunHistory
from kempner.supervisor.policy.outcome import Decision

HEALED_BY_A_RESTART = (ExitCode.CRASHED, ExitCode.PEERS_LOST, ExitCode.HUNG)
"""Failures that a restart can help with; the other codes need a person, or are no failure."""

PAUSES = (0.0, 20.0, 60.0)
"""Seconds before the first, the second and later restarts in a row after a loss of nodes or of the
network, which may be back by then."""

FAILURES = (
    *HEALED_BY_A_RESTART,
    ExitCode.STORAGE_UNAVAILABLE,
    ExitCode.BAD_DATA,
    ExitCode.CHECKPOINT_FAILED,
    ExitCode.DIVERGED,
)
"""The ends after which the ranks are restarted, or kempner gives up. A wrong command line is not
one: nothing was trained, and the user corrects it and starts again."""


@dataclass(frozen=True)
class Failure:
    """An attempt that failed, because of one rank. `step` is the one that it was in, or had done
    where it was in none, `committed` the last that was saved (None: none yet), `raised` what that
    rank raised, if it said so, `code` what the attempt came to. `node_lost` says that a node or the
    network is at fault: that has a budget of its own. `unstarted` is the exit status of a program
    that ended within seconds, before it had said a word.
    """

    step: int
    committed: int | None
    raised: str = ""
    node_lost: bool = False
    code: int = ExitCode.CRASHED
    unstarted: int | None = None

    def is_like(self, other: Failure) -> bool:
        """Whether it is the same step that fails the same way, or the same start."""
        if self.unstarted is not None and self.unstarted == other.unstarted:
            return True
        return bool(self.raised) and (self.step, self.raised) == (other.step, other.raised)


@dataclass(frozen=True)
class RestartDecision:
    """Whether to start again, and why or why not, for a person to read.

    `last` says that it is the last time, unless something new is saved; `pause` is how many seconds
    to wait before.
    """

    again: bool
    reason: str
    last: bool = False
    pause: float = 0.0


def decide_restart(
    decision: Decision, failure: Failure, earlier: Sequence[Failure], budget: int
) -> RestartDecision:
    """What to do about an attempt that ended with `decision`.

    `earlier` are the failures before it, oldest first, `budget` how many restarts in a row may pass
    without a new commit, after failures of the program and after losses of nodes each.
    """
    if decision.code not in HEALED_BY_A_RESTART:
        return RestartDecision(False, decision.reason)
    if decision.final:
        return RestartDecision(
            False, f"{decision.reason}, which program.fail_codes names: a restart would not help"
        )
    here = f"at step {failure.step}" if failure.step else "before the first step"
    alike = [other for other in earlier if other.node_lost is failure.node_lost]
    fruitless = list(takewhile(lambda f: f.committed == failure.committed, reversed(alike)))
    if any(failure.is_like(other) for other in fruitless):
        return RestartDecision(
            False,
            f"{decision.reason}. It fails {here} every time: a restart would not help",
        )
    if len(fruitless) >= budget:
        attempts = f"{len(fruitless) + 1} attempts" if fruitless else "The attempt"
        return RestartDecision(False, f"{decision.reason}. {attempts} saved nothing new: giving up")
    start = "from the beginning" if failure.committed is None else f"from step {failure.committed}"
    last = len(fruitless) + 1 >= budget
    pause = PAUSES[min(len(fruitless), len(PAUSES) - 1)] if failure.node_lost else 0.0
    return RestartDecision(True, f"{decision.reason} {here}; restarting {start}", last, pause)


def as_it_worked_before(decision: Decision, worked: bool) -> Decision:
    """What an attempt came to, in a run that has `worked` before: that is never misconfigured.

    What its ranks refuse to start with must be the fault of a node or the network, and may pass.
    """
    if decision.code is not ExitCode.USAGE or not worked:
        return decision
    return replace(decision, code=ExitCode.CRASHED, environment=True)


def failures(history: RunHistory) -> list[Failure]:
    """The failures since the run was last given up, or a program that does not report got further
    than ever; without those of storage.
    """
    found: list[Failure] = []
    for event in history.events(AttemptFailed, RunGivenUp, ProgramAdvanced):
        if not isinstance(event, AttemptFailed):
            found.clear()  # a person has looked, and starts again; or it got further than before
        elif event.code != ExitCode.STORAGE_UNAVAILABLE:
            raised, lost = event.raised, event.node_lost
            failure = Failure(event.step, event.committed, raised, lost, event.code)
            found.append(replace(failure, unstarted=event.unstarted))
    return found


def prevents_restart(failure: Failure, earlier: Sequence[Failure], worked: bool) -> bool:
    """Whether `GAVE_UP` is to keep a run from another start.

    It keeps nodes from being used by a run that has trained and cannot go on. Where no step was
    made, or the data does not fit, the user corrects the command and starts again. `worked` says
    that a program of whose steps nothing is known has run for long.
    """
    if failure.code == ExitCode.BAD_DATA and failure.step == 0:
        return False
    made_a_step = failure.committed is not None or any(f.step > 1 for f in (*earlier, failure))
    return made_a_step or worked


FIRST_PAUSE, LONGEST_PAUSE = 5.0, 60.0
"""Seconds from the first failure to the restart, and the most: each pause is twice as long."""


@dataclass(frozen=True)
class StorageOutage:
    """Attempts in a row that ended because of storage: how many, and `since` when, in Unix time."""

    attempts: int
    since: float


def find_outage(history: RunHistory, committed: int | None, now: float) -> StorageOutage:
    """The failures that have just ended an attempt, and those before it.

    `committed` is the last step that was saved: whatever was saved in between ends an outage.
    """

    def belongs(entry: Entry[AttemptFailed | RunGivenUp]) -> bool:
        event = entry.event
        storage = isinstance(event, AttemptFailed) and event.code == ExitCode.STORAGE_UNAVAILABLE
        return storage and event.committed == committed  # type: ignore[union-attr]

    entries = reversed(history.entries(AttemptFailed, RunGivenUp))
    times = [entry.time for entry in takewhile(belongs, entries)]
    return StorageOutage(len(times), min(times, default=now))


def decide_storage_restart(
    decision: Decision, outage: StorageOutage, now: float, patience: float
) -> RestartDecision:
    """Whether to start the ranks again, and after how many seconds.

    Each attempt has been patient itself; this is about storage that lasts until the ranks leave,
    and fails again.
    """
    lasted = now - outage.since
    if lasted >= patience:
        return RestartDecision(
            False,
            f"{decision.reason}. {outage.attempts} attempts in {lasted:.0f} s found it no better",
        )
    pause = min(FIRST_PAUSE * 2.0 ** max(0, outage.attempts - 1), LONGEST_PAUSE)
    return RestartDecision(True, f"{decision.reason}; restarting in {pause:.0f} s", pause=pause)
