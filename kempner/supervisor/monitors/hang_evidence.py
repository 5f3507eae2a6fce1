"""A hang, from the first suspicion to the end of the attempt: first evidence, then the kill."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from kempner.config.resilience import ResilienceSection
from kempner.run.control.protocol import DumpStacks
from kempner.run.process.logs import logger
from kempner.run.record.events.health import ConnectionsStalled, HangFound
from kempner.run.record.events.job import NodeSuspected
from kempner.run.record.ledger import Ledger
from kempner.supervisor.control.events import Connected, LastReport
from kempner.supervisor.control.server import ControlServer
from kempner.supervisor.monitors.hang_detector import SILENT, Hang, HangDetector
from kempner.supervisor.monitors.phase_durations import PhaseDurations
from kempner.supervisor.monitors.process_probe import is_here, of_processes

EVIDENCE = 3.0
"""Seconds that ranks and nodes get to say what they see, before the ranks are killed."""


class HangEvidence:
    """Watches one attempt for a hang. Times are seconds of a clock that knows of suspensions."""

    def __init__(
        self,
        attempt: int,
        section: ResilienceSection,
        channel: ControlServer,
        ledger: Ledger,
        job: str | None,
        now: float,
    ) -> None:
        self._attempt, self._channel, self._ledger, self._job = attempt, channel, ledger, job
        self._stillness = HangDetector(section, now)
        self._noticed_at = 0.0
        self._processes: Sequence[str] = ()
        self._stalled: dict[int, tuple[tuple[str, str], ...]] = {}
        self.found: Hang | None = None
        """What the attempt is ended for, once there is something."""
        self.over = False
        """Whether the evidence is on disk: the ranks can be killed."""

    def see(
        self,
        now: float,
        last_reports: Mapping[int, LastReport],
        joined: Mapping[int, Connected],
        usual: PhaseDurations,
    ) -> None:
        """Take a look; notice a hang, ask for evidence, and close the case a little later."""
        if self.found is None:
            self.found = self._stillness.see(last_reports, now, time.monotonic(), usual)
            if self.found is not None:
                self._noticed_at = now
                self._channel.tell(DumpStacks())
                suspicious = worth_a_look(self.found, last_reports, joined, time.monotonic())
                self._processes = of_processes(suspicious, self._job)
        elif not self.over and now - self._noticed_at > EVIDENCE:
            self._close(self.found, last_reports, joined)

    def hear(self, rank: int, stalled: ConnectionsStalled) -> None:
        """A rank says which of its node's connections deliver nothing, by their addresses."""
        self._stalled[rank] = stalled.ends

    def _close(
        self, hang: Hang, last_reports: Mapping[int, LastReport], joined: Mapping[int, Connected]
    ) -> None:
        cut_off = cut_off_from_others(self._stalled)
        if hang.laggard is None and cut_off is not None:
            node = joined[cut_off].host
            reason = f"rank {cut_off} on {node} is cut off: what is sent to and from it is lost"
            hang = replace(hang, laggard=cut_off, sentence=f"{hang.sentence}; {reason}")
            self._ledger.record(NodeSuspected(node, reason), self._attempt)
        self.found, self.over = hang, True
        logger().warning(hang.sentence)
        waiting, processes = by_what_they_wait_for(last_reports), tuple(self._processes)
        event = HangFound(hang.sentence, hang.laggard, waiting, processes)
        self._ledger.record(event, self._attempt)


def worth_a_look(
    hang: Hang,
    last_reports: Mapping[int, LastReport],
    joined: Mapping[int, Connected],
    clock: float,
) -> dict[str, list[int]]:
    """Processes to look at from outside, by host: all of this one, and elsewhere those of ranks
    that say nothing, or are behind; all of them if that could be anyone.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, there in sorted(joined.items()):
        silent = rank not in last_reports or clock - last_reports[rank].at > SILENT
        if silent or hang.laggard in (rank, None) or is_here(there.host):
            found[there.host].append(there.pid)
    return dict(found)


def by_what_they_wait_for(last_reports: Mapping[int, LastReport]) -> dict[str, list[int]]:
    """Ranks by the collective that they wait for others in; under "nothing" those that do not."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, seen in sorted(last_reports.items()):
        found[seen.report.waiting or "nothing"].append(rank)
    return dict(found)


def cut_off_from_others(stalled: Mapping[int, Iterable[tuple[str, str]]]) -> int | None:
    """The rank whose node every stalled connection leads to or from; None if there is no such.

    `stalled` has the near and far addresses that the ranks of each node see. A connection between
    two nodes does not tell which of them is cut off: it takes a third.
    """
    links = {frozenset(ends) for connections in stalled.values() for ends in connections}
    ends = Counter(address for link in links for address in link)
    (worst, count), *others = [*ends.most_common(2), ("", 0)][:2]
    if count < 2 or count < len(links) or others[0][1] == count:
        return None
    near = (r for r, connections in sorted(stalled.items()) if worst in (a for a, _ in connections))
    return next(near, None)
