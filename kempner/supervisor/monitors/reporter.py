"""What the supervisor notes in the ledger while all goes on: habits, who is slow, who swells."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import Phase, Usage
from kempner.run.process.logs import logger
from kempner.run.record.events.base import LedgerEvent
from kempner.run.record.events.health import Recovered, SlowDownFound, StragglerFound
from kempner.run.record.events.job import NodeSuspected
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.events import Connected, LastReport
from kempner.supervisor.monitors.memory import MemoryMonitor
from kempner.supervisor.monitors.phase_durations import to_event
from kempner.supervisor.monitors.phase_stats import PhaseStats
from kempner.supervisor.monitors.straggler import Straggler, StragglerMonitor

RECORD_EVERY = 600.0
"""Seconds between two notes of how long the phases of the run take, in case this process dies."""


class Reporter:
    """Of one attempt of `size` ranks, whose pace `phase_stats` takes."""

    def __init__(
        self,
        attempt: int,
        size: int,
        section: ResilienceSection,
        ledger: Ledger,
        phase_stats: PhaseStats,
    ) -> None:
        self._attempt, self._size, self._section = attempt, size, section
        self._ledger, self._pace = ledger, phase_stats
        usual = phase_stats.usual().get(Phase.STEP)
        self._slowness = StragglerMonitor(section, None if usual is None else usual.median)
        self._memory = MemoryMonitor(section)
        self._kept_at = 0.0

    def see(
        self,
        now: float,
        last_reports: Mapping[int, LastReport],
        usage: Mapping[int, Usage],
        joined: Mapping[int, Connected],
    ) -> None:
        """Take a look; `now` is in seconds of the attempt."""
        if now - self._kept_at > RECORD_EVERY:
            self._kept_at = now
            self.record_phase_durations()
        found = self._slowness.see(last_reports, now, self._size)
        if found.straggler is not None:
            self._name(found.straggler, joined)
        if found.slow is not None:
            logger().warning(found.slow.sentence)
            self._record(SlowDownFound(reason=found.slow.sentence, **asdict(found.slow)))
        for what in found.recovered:
            self._record(Recovered(of=what))
        hosts = {rank: there.host for rank, there in joined.items()}
        for trouble in self._memory.see(usage, hosts, now):
            node = hosts.get(trouble.rank)
            logger().warning(f"rank {trouble.rank} on {node}: {trouble.reason}")
            self._record(trouble.event(trouble.rank, node, trouble.reason))

    def record_phase_durations(self) -> None:
        """Note how long the phases of this run take."""
        if phase_durations := self._pace.learned():
            self._record(to_event(phase_durations, self._size))

    def _name(self, straggler: Straggler, joined: Mapping[int, Connected]) -> None:
        there = joined.get(straggler.rank)
        node = None if there is None else there.host
        reason = f"rank {straggler.rank}{f' on {node}' if node else ''} {straggler.sentence}"
        logger().warning(reason)
        self._record(StragglerFound(node=node, reason=reason, **asdict(straggler)))
        if self._section.straggler_is_suspect and node is not None:
            self._record(NodeSuspected(node, reason))

    def _record(self, event: LedgerEvent) -> None:
        self._ledger.record(event, self._attempt)
