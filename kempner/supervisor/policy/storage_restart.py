"""Decides whether to restart the ranks after storage failed: a pure function of the history.

That it failed again within seconds proves nothing. What counts is for how long it has, since the
first failure after which nothing new was saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import takewhile

from kempner.run.process.exit_codes import ExitCode
from kempner.run.record.events.attempt import AttemptFailed, RunGivenUp
from kempner.run.record.history import Entry, RunHistory
from kempner.supervisor.policy.outcome import Decision
from kempner.supervisor.policy.restart import RestartDecision

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
