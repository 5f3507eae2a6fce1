"""The evidence of a hang: what ranks and nodes see of it before the ranks are killed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from kempner.run.control.protocol import DumpStacks, FromSupervisor, Phase, Report
from kempner.run.output.logs import logger
from kempner.run.process.whereabouts import Place
from kempner.run.record.events.health import (
    ConnectionsStalled,
    HangFound,
    OwnProgramStands,
    StandsAt,
)
from kempner.run.record.events.job import NodeSuspected
from kempner.run.record.ledger import Ledger
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import Hang
from kempner.supervisor.monitors.process_probe import ProcessLook, is_here

EVIDENCE, NODES_ANSWER = 3.0, 12.0
"""Seconds that ranks get to say what they see, and nodes at most, before the ranks are killed."""

PLACES_TOLD = 4
"""Different places that a sentence tells of at most."""


class HangEvidence:
    """Collects what ranks and nodes say of a hang of one attempt, and tells of it in the end.

    `tell` sends a message to all ranks, `look` asks another node about processes (`Launcher.look`).
    """

    def __init__(
        self,
        attempt: int,
        tell: Callable[[FromSupervisor], None],
        ledger: Ledger,
        look: Callable[[str, Sequence[int]], Sequence[str]],
    ) -> None:
        self._attempt, self._tell, self._ledger, self._ask = attempt, tell, ledger, look
        self._look, self._began = ProcessLook({}, look), 0.0
        self._stalled: dict[int, tuple[tuple[str, str], ...]] = {}
        self._places: dict[int, Place] = {}
        self.hang: Hang | None = None
        """What evidence is collected of; in the end, with what it has brought to light."""

    def collect(self, hang: Hang, snapshot: Snapshot) -> None:
        """Ask the ranks for their stacks, and look at processes that may be stuck."""
        self.hang, self._began = hang, snapshot.now
        self._tell(DumpStacks())
        self._look = ProcessLook(worth_a_look(hang, snapshot), self._ask)

    def complete(self, now: float) -> bool:
        """Whether the ranks have had their time, and every node that was asked has answered."""
        return self.hang is not None and now - self._began > EVIDENCE and self._look.complete

    def hear(self, rank: int, said: ConnectionsStalled | StandsAt) -> None:
        """A rank says which of its node's connections deliver nothing, by their addresses; or where
        its program stands."""
        if isinstance(said, ConnectionsStalled):
            self._stalled[rank] = said.ends
        else:
            self._places[rank] = Place(said.line, said.collective)

    def close(self, snapshot: Snapshot) -> None:
        """Tell what has come together, if there is a hang."""
        if (hang := self.hang) is None:
            return
        hosts = {rank: there.host for rank, there in snapshot.joined.items()}
        cut_off = cut_off_from_others(self._stalled, hosts, silent_node(snapshot))
        if cut_off is not None and hang.laggard in (None, *_on(hosts[cut_off], hosts)):
            cut_off = cut_off if hang.laggard is None else hang.laggard
            node = hosts[cut_off]
            reason = f"rank {cut_off} on {node} is cut off: what is sent to and from it is lost"
            hang = replace(hang, laggard=cut_off, sentence=f"{hang.sentence}; {reason}")
            self._ledger.record(NodeSuspected(node, reason), self._attempt)
        busy, stands = may_be_at_work(self._places, snapshot.reports), None
        if self._places:
            places = {str(rank): at.words for rank, at in sorted(self._places.items())}
            step = max((report.step for report in snapshot.reports.values()), default=0)
            stands = OwnProgramStands(step, places, busy)
            hang = replace(hang, sentence=f"{hang.sentence}; {_say_places(self._places, busy)}")
        self.hang = hang
        logger().warning(hang.sentence)
        waiting, processes = by_what_they_wait_for(snapshot.reports), tuple(self._look.lines)
        evidence = snapshot.now - self._began
        still = round(hang.still + evidence, 1)
        told = (hang.sentence, hang.laggard, waiting, processes, still, round(evidence, 1))
        self._ledger.record(HangFound(*told, stands), self._attempt)


def may_be_at_work(places: Mapping[int, Place], reports: Mapping[int, Report]) -> int | None:
    """The first rank that may be at work between two steps: that waits in no collective.

    None if all do, or if what they are in is no step of the user's.
    """
    for rank, place in sorted(places.items()):
        report = reports.get(rank)
        in_step = report is not None and report.phase in (Phase.STEP, Phase.COMPILE)
        if in_step and report is not None and not (place.collective or report.waiting):
            return rank
    return None


def _say_places(places: Mapping[int, Place], busy: int | None) -> str:
    """Where ranks stand, one of those that are alike, and what to do if that was work."""
    first: dict[str, int] = {}
    for rank, place in sorted(places.items()):
        first.setdefault(place.words, rank)
    told = ", ".join(f"rank {rank} is {words}" for words, rank in list(first.items())[:PLACES_TOLD])
    if busy is None:
        return told
    return f"{told}; if rank {busy} was at work there, put that into `with steps.evaluation():`"


def worth_a_look(hang: Hang, snapshot: Snapshot) -> dict[str, list[int]]:
    """Processes to look at from outside, by host: all of this one, and elsewhere those of ranks
    that say nothing, or are behind; all of them if that could be anyone.
    """
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, there in sorted(snapshot.joined.items()):
        silent = rank not in snapshot.reports or rank in snapshot.silent
        if silent or hang.laggard in (rank, None) or is_here(there.host):
            found[there.host].append(there.pid)
    return dict(found)


def by_what_they_wait_for(reports: Mapping[int, Report]) -> dict[str, list[int]]:
    """Ranks by the collective that they wait for others in; under "nothing" those that do not."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, report in sorted(reports.items()):
        found[report.waiting or "nothing"].append(rank)
    return dict(found)


def silent_node(snapshot: Snapshot) -> str | None:
    """The only node that nothing is heard of, if there is one."""
    heard = {there.host for rank, there in snapshot.joined.items() if rank not in snapshot.silent}
    silent = {there.host for there in snapshot.joined.values()} - heard
    return min(silent) if len(silent) == 1 else None


def cut_off_from_others(
    stalled: Mapping[int, Iterable[tuple[str, str]]],
    hosts: Mapping[int, str],
    silent: str | None = None,
) -> int | None:
    """The rank whose node every stalled connection leads to or from; None if there is no such.

    `stalled` has the near and far addresses that the ranks of each node see, `hosts` each rank's
    node. A connection between two nodes does not tell which of them is cut off: it takes a third,
    or that one of them reports and the other is `silent`, whose address no rank that reports has.
    """
    links = {frozenset(ends) for connections in stalled.values() for ends in connections}
    near = {ends[0]: rank for rank in sorted(stalled, reverse=True) for ends in stalled[rank]}
    common = frozenset.intersection(*links) if links else frozenset()
    if len(links) < 2:
        common -= near.keys()
    if len(common) != 1:
        return None
    (address,) = common
    return near.get(address, min(_on(silent, hosts), default=None))


def _on(node: str | None, hosts: Mapping[int, str]) -> set[int]:
    """The ranks of a node."""
    return {rank for rank, host in hosts.items() if host == node}
