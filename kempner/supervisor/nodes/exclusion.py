"""Decides which nodes are suspect: a pure function of the ledger.

A node is suspect by evidence, for as long as `resilience.suspect_for` says:

- an event `suspect` names it (a failed health check, no answer, whatever else somebody saw);
- a rank on it failed with words that speak of a broken GPU or memory;
- its ranks were the first to fail in two attempts running, or as soon as it was taken back.

What was said before the run took it back does not count.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from kempner.run.record.events.attempt import AttemptFailed
from kempner.run.record.events.job import NodesTakenBack, NodeSuspected
from kempner.run.record.history import Entry, RunHistory

_BROKEN = re.compile(
    r"\bXid\b|\bECC\b|uncorrectable|fallen off the bus|GPU is lost"
    r"|hardware (?:error|stack)|NVLink|CUDA error|CUDA driver|cudaError|machine check"
    # ROCm's words for the same
    r"|HIP error|hipError|\bHSA_STATUS_ERROR|HW Exception by GPU|\bRAS\b.*error|GPU Hang",
    re.IGNORECASE,
)
_MISTAKEN = re.compile(
    r"out of memory|device-side assert|invalid (?:argument|configuration|device|resource)"
    r"|illegal memory access|no kernel image|driver version is insufficient"
    r"|(?:unspecified )?launch (?:failure|timed out)|misaligned address|illegal instruction"
    r"|hipError(?:OutOfMemory|Invalid|Illegal|LaunchFailure|NoBinary|Assert)"
    r"|HSA_STATUS_ERROR_(?:OUT_OF_RESOURCES|INVALID|EXCEPTION|ILLEGAL|MEMORY_APERTURE)"
    r"|Memory access fault by GPU",
    re.IGNORECASE,
)
"""What CUDA and ROCm say of a program as well, on a GPU that is sound; twice in a row it counts all
the same."""


_AT_ONCE = "its ranks failed first as soon as it was taken back"


@dataclass(frozen=True)
class Suspect:
    """A node, why it is suspect, and since when (seconds since the epoch).

    `proven` says that there is more against it than that its ranks failed first, `failed` that its
    ranks failed, and nothing else explains it: no health check refutes that.
    """

    node: str
    reason: str
    since: float
    proven: bool
    failed: bool = False


def suspects(history: RunHistory, now: float, keep_for: float) -> dict[str, Suspect]:
    """The suspect nodes by name, each with the last evidence of the last `keep_for` seconds.

    `now` is in seconds since the epoch.
    """
    found: dict[str, Suspect] = {}
    before: Entry[AttemptFailed] | None = None
    back: dict[str, int] = {}
    for entry in history.entries(NodeSuspected, AttemptFailed, NodesTakenBack):
        if entry.time < now - keep_for:
            continue
        event, reason = entry.event, ""
        if isinstance(event, NodesTakenBack):
            found = {node: s for node, s in found.items() if node not in event.nodes}
            back |= dict.fromkeys(event.nodes, entry.attempt + 1)
            continue
        evidence, at_once = _evidence(event), False
        if isinstance(event, AttemptFailed):
            failure = Entry(event, entry.time, entry.attempt)
            reason, before = _habit(failure, before), failure
            at_once = not reason and back.get(event.node) == entry.attempt
            reason = _AT_ONCE if at_once else reason
        if (evidence or reason) and (node := event.node):
            earlier = found.get(node)
            proven = bool(evidence) or (earlier is not None and earlier.proven)
            failed = isinstance(event, AttemptFailed) and (bool(evidence) or not at_once)
            failed = failed or (earlier is not None and earlier.proven and earlier.failed)
            found[node] = Suspect(node, evidence or reason, entry.time, proven, failed)
    return found


def speaks_of_the_machine(words: str) -> bool:
    """Whether an error is one that a sound GPU does not have, whatever the program."""
    return bool(_BROKEN.search(words)) and not _MISTAKEN.search(words)


def _evidence(event: NodeSuspected | AttemptFailed) -> str:
    """What this event has against its node; empty if nothing."""
    if isinstance(event, NodeSuspected):
        return event.reason
    return event.raised if speaks_of_the_machine(event.raised) else ""


def _habit(failure: Entry[AttemptFailed], before: Entry[AttemptFailed] | None) -> str:
    """Says if the node's ranks failed first once more; `before` is the failure before."""
    if before is None or before.attempt != failure.attempt - 1:
        return ""
    if before.event.node != failure.event.node:
        return ""
    return f"its ranks failed first in attempts {before.attempt} and {failure.attempt}"
