"""Turns what monitors find into lines of the log and of the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from kempner.run.control.protocol import SUSPECT
from kempner.run.process.logs import logger
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.events import Connected
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import (
    MemoryLow,
    PhasesLearned,
    Recovered,
    Remark,
    SlowDown,
    SteadyGrowth,
    Straggler,
)
from kempner.supervisor.monitors.phase_durations import LEARNED, to_fields


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
                self._record("slow_down", reason=finding.sentence, **asdict(finding))
            case Recovered():
                self._record("recovered", of=finding.of)
            case MemoryLow():
                self._warn("memory_low", finding, snapshot.joined)
            case SteadyGrowth():
                self._warn("growth", finding, snapshot.joined)
            case PhasesLearned():
                self._record(LEARNED, ranks=snapshot.size, phases=to_fields(finding.phases))

    def _warn(
        self, event: str, found: MemoryLow | SteadyGrowth, joined: Mapping[int, Connected]
    ) -> None:
        node = _node(found.rank, joined)
        logger().warning(f"rank {found.rank} on {node}: {found.reason}")
        self._record(event, rank=found.rank, node=node, reason=found.reason)

    def _name(self, straggler: Straggler, joined: Mapping[int, Connected]) -> None:
        node = _node(straggler.rank, joined)
        reason = f"rank {straggler.rank}{f' on {node}' if node else ''} {straggler.sentence}"
        logger().warning(reason)
        self._record("straggler", node=node, reason=reason, **asdict(straggler))
        if self._straggler_is_suspect and node is not None:
            self._record(SUSPECT, node=node, reason=reason)

    def _record(self, event: str, **fields: object) -> None:
        self._ledger.record(event, attempt=self._attempt, **fields)


def _node(rank: int, joined: Mapping[int, Connected]) -> str | None:
    return joined[rank].host if rank in joined else None
