"""Tells a hang from a slow step, and gathers its evidence before the ranks are killed."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

from kempner.config.resilience import ResilienceSection
from kempner.run.control.heartbeat import Standstill, patience
from kempner.run.control.protocol import DumpStacks, FromSupervisor, Phase, Report
from kempner.run.output.logs import logger
from kempner.run.process.retry import LONGEST_PAUSE
from kempner.run.process.whereabouts import CodePlace
from kempner.run.record.events import (
    ConnectionsStalled,
    HangFound,
    NodeSuspected,
    OwnProgramStands,
    StandsAt,
)
from kempner.run.record.ledger import Ledger
from kempner.supervisor.monitors.base import Snapshot
from kempner.supervisor.monitors.findings import Hang
from kempner.supervisor.monitors.phase_durations import PhaseDurations
from kempner.supervisor.monitors.process_probe import ProcessLook, is_here

_ORDER = (
    *(Phase.START, Phase.RENDEZVOUS, Phase.LOAD),
    *(Phase.SAVE, Phase.EVAL, Phase.COMPILE, Phase.STEP, Phase.EXIT),
)
"""Phases as they follow each other after the same last step."""

STORAGE_TRIES = 3 * LONGEST_PAUSE
"""Seconds within which a rank that waits for storage tries again, and thereby moves."""

GROWTH = 5.0
"""How many times as long a standstill must last as one that was ended for a hang after the same
step, where a rank may have been at work."""

NAMED = 10
"""Ranks that a sentence names at most."""

_Places: TypeAlias = dict[int, tuple[int, Phase, int]]


class HangDetector:
    """Watches whether any rank moves: makes a step, enters another phase, or tries again what
    storage has refused. While a rank retries, this is no hang; its own patience ends it.

    What is normal is learned from the run: `patience` is the configured multiple of the 95th
    percentile of what the phase takes (a step: of the time between two), at least the configured
    floor, and at most the phase's ceiling, which alone counts where nothing was learned. Ranks that
    `must_report` hang if they never do; of others that never do nothing is known. Of a program that
    never connects, whose steps are read from files, only the ceiling counts: what it does between
    two steps is not known.

    A program of the user's own may also be at work between two steps, see `_own_limit`; `hung` has
    the longest standstill that was ended for a hang while a rank may have been at work, by step.
    """

    def __init__(
        self,
        section: ResilienceSection,
        now: float,
        must_report: bool = True,
        hung: Mapping[int, float] | None = None,
    ) -> None:
        self._section, self._must_report, self._hung = section, must_report, hung or {}
        self._still: Standstill[_Places] = Standstill({}, now)
        self._stacks: Standstill[dict[int, int]] = Standstill({}, now)

    def check(self, snapshot: Snapshot) -> Sequence[Hang]:
        """The hang, for as long as there is one."""
        places = {rank: (r.step, r.phase, r.moves.tries) for rank, r in snapshot.reports.items()}
        if snapshot.around.unstarted:
            self._still = Standstill(places, snapshot.now)
        self._still = self._still.seen(places, snapshot.now)
        known = snapshot.usual if self._must_report or snapshot.joined else {}
        moves = {rank: report.moves.stacks for rank, report in snapshot.reports.items()}
        self._stacks = self._stacks.seen(moves, snapshot.now)
        still, (limit, phase) = self._still.seconds(snapshot.now), self.patience(known)
        if not self._must_report and snapshot.joined:
            limit = self._own_limit(snapshot, limit)
        if any(report.storage for report in snapshot.reports.values()):
            limit = max(limit, STORAGE_TRIES)
        if still <= limit:
            return ()
        if not places and not self._must_report:
            return ()
        absent = silent_from_the_start(snapshot) if self._must_report else []
        laggard = absent[0] if len(absent) == 1 else behind_all_others(snapshot)
        who = "" if laggard is None else f"; rank {laggard} is behind all others"
        if absent and places:
            who = f"; {_listed(absent)} never connected"
        where = ", ".join(sorted({f"step {step} ({phase})" for step, phase, _ in places.values()}))
        longer, shorter = _distinct_digits(still, limit)
        sentence = (
            f"no rank has moved for {longer} s, longer than the {shorter} s that this run "
            f"ever needs: {where or 'none has reported yet'}{who}"
        )
        return (Hang(sentence, laggard, phase, still),)

    def patience(self, usual: PhaseDurations) -> tuple[float, Phase]:
        """Seconds for which standing still here is no hang, and the phase that needs them."""
        phases = {phase for _, phase, _ in self._still.place.values()} or {Phase.START}
        return max((self._patience(phase, usual), phase) for phase in phases)

    def _own_limit(self, snapshot: Snapshot, limit: float) -> float:
        """Seconds for which a program of the user's own may stand still, by its stacks.

        Without a limit of its own an evaluation has none, unless all ranks wait for each other in
        collectives; nor has what follows the loop, as long as a stack moves. Between two steps a
        stack that moves gets the ceiling.
        """
        phases = {report.phase for report in snapshot.reports.values()}
        moving = self._stacks.seconds(snapshot.now) <= self._section.hang_timeout_min
        if Phase.EVAL in phases and self._section.hang_timeout_max_of.eval is None:
            evaluates = (
                report.phase is Phase.EVAL and not report.waiting and rank not in snapshot.silent
                for rank, report in snapshot.reports.items()
            )
            if moving or any(evaluates):
                return inf
        if moving:
            last = phases == {Phase.EXIT}
            limit = inf if last else max([limit, *map(self._ceiling, phases)])
        step = max((report.step for report in snapshot.reports.values()), default=0)
        most = max(self._section.hang_timeout_max, GROWTH**2 * self._section.hang_timeout_min)
        return max(limit, min(most, GROWTH * self._hung.get(step, 0.0)))

    def _ceiling(self, phase: Phase) -> float:
        return self._section.hang_timeout_max_of.of(phase) or self._section.hang_timeout_max

    def _patience(self, phase: Phase, usual: PhaseDurations) -> float:
        section, ceiling = self._section, self._ceiling(phase)
        long = section.hang_factor * usual[phase].long if phase in usual else None
        return patience(section.hang_timeout_min, ceiling, long)


def _distinct_digits(longer: float, shorter: float) -> tuple[str, str]:
    """Two numbers with as few digits as show that they differ."""
    for digits in range(3):
        if f"{longer:.{digits}f}" != f"{shorter:.{digits}f}":
            break
    return f"{longer:.{digits}f}", f"{shorter:.{digits}f}"


def silent_from_the_start(snapshot: Snapshot) -> list[int]:
    """The ranks that have said nothing in this attempt: their tasks may never have started."""
    known = snapshot.reports.keys() | snapshot.joined.keys()
    return [rank for rank in range(snapshot.size) if rank not in known]


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED]))}{more} have"


def behind_all_others(snapshot: Snapshot) -> int | None:
    """The rank that the others wait for; None if that cannot be told.

    The one that says nothing any more; or else the one that is a step or a phase behind; or else,
    among those, the one that does not itself wait for others.
    """
    if len(snapshot.silent) == 1:
        return next(iter(snapshot.silent))
    reports = snapshot.reports
    places = {rank: (r.step, _ORDER.index(r.phase)) for rank, r in reports.items()}
    last = [rank for rank, place in places.items() if place == min(places.values())]
    if len(last) > 1:
        last = [rank for rank in last if not reports[rank].waiting]
    return last[0] if len(last) == 1 < len(places) else None


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
        self._places: dict[int, CodePlace] = {}
        self.hang: Hang | None = None
        """What evidence is collected of; in the end, with what it has brought to light."""

    def collect(self, hang: Hang, snapshot: Snapshot) -> None:
        """Ask the ranks for their stacks, and look at processes that may be stuck."""
        self.hang, self._began = hang, snapshot.now
        self._tell(DumpStacks())
        self._look = ProcessLook(processes_to_look_at(hang, snapshot), self._ask)

    def complete(self, now: float) -> bool:
        """Whether the ranks have had their time, and every node that was asked has answered."""
        return self.hang is not None and now - self._began > EVIDENCE and self._look.complete

    def hear(self, rank: int, said: ConnectionsStalled | StandsAt) -> None:
        """A rank says which of its node's connections deliver nothing, by their addresses; or where
        its program stands."""
        if isinstance(said, ConnectionsStalled):
            self._stalled[rank] = said.ends
        else:
            self._places[rank] = CodePlace(said.line, said.collective)

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


def may_be_at_work(places: Mapping[int, CodePlace], reports: Mapping[int, Report]) -> int | None:
    """The first rank that may be at work between two steps: that waits in no collective.

    None if all do, or if what they are in is no step of the user's.
    """
    for rank, place in sorted(places.items()):
        report = reports.get(rank)
        in_step = report is not None and report.phase in (Phase.STEP, Phase.COMPILE)
        if in_step and report is not None and not (place.collective or report.waiting):
            return rank
    return None


def _say_places(places: Mapping[int, CodePlace], busy: int | None) -> str:
    """Where ranks stand, one of those that are alike, and what to do if that was work."""
    first: dict[str, int] = {}
    for rank, place in sorted(places.items()):
        first.setdefault(place.words, rank)
    told = ", ".join(f"rank {rank} is {words}" for words, rank in list(first.items())[:PLACES_TOLD])
    if busy is None:
        return told
    return f"{told}; if rank {busy} was at work there, put that into `with steps.evaluation():`"


def processes_to_look_at(hang: Hang, snapshot: Snapshot) -> dict[str, list[int]]:
    """Processes to look at from outside, by host: all of this one, and elsewhere those of ranks
    that say nothing, or are behind; all of them if any of them could be the cause.
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
    """The node whose ranks are all silent, if there is exactly one."""
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
