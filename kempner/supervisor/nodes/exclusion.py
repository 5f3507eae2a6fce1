"""Decides which nodes are suspect: a pure function of the ledger.

A node is suspect by evidence, for as long as `resilience.suspect_for` says:

- an event `suspect` names it (a failed health check, no answer, whatever else somebody saw);
- a rank on it failed with words that speak of a broken GPU or memory;
- its ranks were the first to fail in two attempts running.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kempner.run.control.protocol import SUSPECT

FAILED = "attempt_failed"
"""The event that says on which `node` the rank was that failed first, and what it `raised`."""

_BROKEN = re.compile(
    r"\bXid\b|\bECC\b|uncorrectable|fallen off the bus|GPU is lost|unspecified launch failure"
    r"|hardware (?:error|stack)|NVLink|CUDA error|CUDA driver|cudaError|machine check",
    re.IGNORECASE,
)
_MISTAKEN = re.compile(
    r"out of memory|device-side assert|invalid (?:argument|configuration|device ordinal)"
    r"|illegal memory access|no kernel image|driver version is insufficient",
    re.IGNORECASE,
)
"""What CUDA says of a program as well, on a GPU that is sound; twice in a row it counts all the
same."""


@dataclass(frozen=True)
class Suspect:
    """A node, why it is suspect, and since when (seconds since the epoch).

    `proven` says that there is more against it than that its ranks failed first.
    """

    node: str
    reason: str
    since: float
    proven: bool


def suspects(
    events: Iterable[Mapping[str, Any]], now: float, keep_for: float
) -> dict[str, Suspect]:
    """The suspect nodes by name, each with the last evidence of the last `keep_for` seconds.

    `events` are the ledger's lines, oldest first; `now` is in seconds since the epoch.
    """
    found: dict[str, Suspect] = {}
    before: Mapping[str, Any] = {}
    for event in events:
        if event.get("event") not in (SUSPECT, FAILED) or event["time"] < now - keep_for:
            continue
        evidence = _evidence(event)
        reason = evidence or _habit(event, before)
        if event["event"] == FAILED:
            before = event
        if reason and (node := event.get("node")):
            proven = bool(evidence) or (node in found and found[node].proven)
            found[node] = Suspect(node, reason, event["time"], proven)
    return found


def speaks_of_the_machine(words: str) -> bool:
    """Whether an error is one that a sound GPU does not have, whatever the program."""
    return bool(_BROKEN.search(words)) and not _MISTAKEN.search(words)


def _evidence(event: Mapping[str, Any]) -> str:
    """What this event has against its node; empty if nothing."""
    if event["event"] == SUSPECT:
        return str(event["reason"])
    raised = str(event.get("raised", ""))
    return raised if speaks_of_the_machine(raised) else ""


def _habit(event: Mapping[str, Any], before: Mapping[str, Any]) -> str:
    """Says if the node's ranks failed first once more; `before` is the failure before.

    A failed attempt of an earlier version of the ledger names no node.
    """
    running = before.get("attempt") == event["attempt"] - 1
    if running and before.get("node") == event.get("node"):
        return f"its ranks failed first in attempts {before['attempt']} and {event['attempt']}"
    return ""
