"""Turns what monitors find into lines of the log and of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from kempner.run.output.logs import logger
from kempner.run.record.events import (
    LedgerEvent,
    MemoryLow,
    NodeSuspected,
    Recovered,
    ResourceGrowth,
    SlowDownFound,
    StragglerFound,
)
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.events import Connected
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import (
    PhasesLearned,
    Recovery,
    Remark,
    Shortage,
    SlowDown,
    SteadyGrowth,
    Straggler,
)
from kempner.supervisor.monitors.phase_durations import to_event


class Reporter:
    """Of one attempt. Where `straggler_is_suspect`, nothing else starts on a straggler's node."""

    def __init__(self, attempt: int, ledger: Ledger, straggler_is_suspect: bool) -> None:
        self._attempt, self._ledger = attempt, ledger
        self._straggler_is_suspect = straggler_is_suspect

    def report(self, finding: Remark, snapshot: Snapshot) -> None:
        """Tell of what was found in `snapshot`."""
        match finding:
            case Straggler():
                self._name(finding, snapshot.joined)
            case SlowDown():
                logger().warning(finding.sentence)
                self._record(SlowDownFound(reason=finding.sentence, **asdict(finding)))
            case Recovery():
                self._record(Recovered(of=finding.of.name))
            case Shortage():
                self._warn(MemoryLow, finding, snapshot.joined)
            case SteadyGrowth():
                self._warn(ResourceGrowth, finding, snapshot.joined)
            case PhasesLearned():
                self._record(to_event(finding.phases, snapshot.size))

    def _warn(
        self,
        event: type[MemoryLow] | type[ResourceGrowth],
        found: Shortage | SteadyGrowth,
        joined: Mapping[int, Connected],
    ) -> None:
        node = _node(found.rank, joined)
        logger().warning(f"rank {found.rank} on {node}: {found.reason}")
        self._record(event(found.rank, node, found.reason))

    def _name(self, straggler: Straggler, joined: Mapping[int, Connected]) -> None:
        node = _node(straggler.rank, joined)
        reason = f"rank {straggler.rank}{f' on {node}' if node else ''} {straggler.sentence}"
        logger().warning(reason)
        self._record(StragglerFound(node=node, reason=reason, **asdict(straggler)))
        if self._straggler_is_suspect and node is not None:
            self._record(NodeSuspected(node, reason))

    def _record(self, event: LedgerEvent) -> None:
        self._ledger.record(event, self._attempt)


def _node(rank: int, joined: Mapping[int, Connected]) -> str | None:
    return joined[rank].host if rank in joined else None
