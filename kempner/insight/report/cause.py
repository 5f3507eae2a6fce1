"""Why an attempt ended, from what the ledger tells of it."""

from __future__ import annotations

from enum import StrEnum

from kempner.insight.report.attempts import AttemptFacts
from kempner.run.record.events.attempt import AttemptEnded, AttemptFailed
from kempner.run.record.events.stop import Stopped


class Kind(StrEnum):
    """What sort of interruption it is."""

    FAILURE = "failure"
    HANG = "hang"
    STOP = "stop"
    SILENT = "no message"

    @property
    def is_failure(self) -> bool:
        """Whether something went wrong, other than a stop that was asked for."""
        return self is not Kind.STOP


def cause_of(facts: AttemptFacts) -> tuple[Kind, str, str]:
    """What sort it is, the cause in one sentence, and what else is known."""
    ended, failed, hang = facts.last(AttemptEnded), facts.last(AttemptFailed), facts.hang()
    reason = "" if ended is None else ended.event.reason
    if hang is not None:
        return Kind.HANG, "nothing moved any more", hang.event.reason
    if facts.stop_reason.ends_run or (facts.in_order and failed is None):
        stopped = facts.last(Stopped)
        words = facts.stop_reason.words
        detail = "" if stopped is None else stopped.event.sentence
        return Kind.STOP, f"stopped: {words}", detail if detail != words else ""
    if failed is not None or reason:
        raised = "" if failed is None else failed.event.raised
        return Kind.FAILURE, reason or "a rank failed", "" if raised in reason else raised
    return Kind.SILENT, "the supervisor ended without a message", ""
