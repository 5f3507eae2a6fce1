"""Distinguishes a hang from a slow step, and collects evidence before the ranks are killed."""

from __future__ import annotations

import os
import platform
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import inf
from typing import TypeAlias

from kempner.config.resilience import ResilienceSection
from kempner.probe.processes import describe_process, started_later_by_same_user, still_runs
from kempner.run.control.heartbeat import Standstill, patience
from kempner.run.control.protocol import Connected, DumpStacks, FromSupervisor, Phase, Report
from kempner.run.output.logs import logger
from kempner.run.process.retry import LONGEST_PAUSE
from kempner.run.process.threads import start_thread
from kempner.run.process.whereabouts import CodePlace
from kempner.run.record.events import (
    ConnectionsStalled,
    HangFound,
    NodeSuspected,
    OwnProgramStands,
    StandsAt,
)
from kempner.run.record.ledger import Ledger
from kempner.supervisor.monitors.base import Hang, LongWork, PhaseDurations, Snapshot

NOT_KILLED = "does not end though it was killed: it is stuck in the kernel"

NODES_ASKED = 8
"""Nodes that are asked about their processes at most."""


def is_here(host: str) -> bool:
    here = platform.node()
    return host in (here, here.partition(".")[0])


def local_processes(joined: Mapping[int, Connected]) -> dict[int, Connected]:
    """The ranks whose processes run on this host."""
    return {rank: there for rank, there in joined.items() if _runs_here(there)}


def describe_stuck(rank: int, there: Connected) -> str:
    """A sentence about a rank that outlives its SIGKILL; empty if its process is gone."""
    here = is_here(there.host)
    if here and not _runs_here(there):
        return ""
    seen = f" ({describe_process(there.pid)})" if here else ""
    return f"rank {rank}, process {there.pid}, {NOT_KILLED}{seen}"


def _runs_here(there: Connected) -> bool:
    ours = is_here(there.host) and started_later_by_same_user(there.pid, os.getpid())
    return ours and still_runs(there.pid)


class ProcessLook:
    """Descriptions of processes, by node: `lines` has those of this node at once, and grows as
    other nodes answer, which `ask` asks."""

    def __init__(
        self,
        where: Mapping[str, Sequence[int]],
        ask: Callable[[str, Sequence[int]], Sequence[str]],
    ) -> None:
        self._ask_node = ask
        self.lines = [
            describe_process(pid) for host, pids in where.items() if is_here(host) for pid in pids
        ]
        others = [host for host in where if not is_here(host)]
        self._asked = [
            start_thread(f"ask {host}", partial(self._ask, host, where[host]))
            for host in others[:NODES_ASKED]
        ]

    @property
    def complete(self) -> bool:
        return not any(thread.is_alive() for thread in self._asked)

    def _ask(self, node: str, pids: Sequence[int]) -> None:
        answer = self._ask_node(node, pids)
        self.lines.extend(f"{node}: {line}" for line in answer or ["no answer"])


_ORDER = (
    *(Phase.START, Phase.RENDEZVOUS, Phase.LOAD),
    *(Phase.SAVE, Phase.EVAL, Phase.COMPILE, Phase.STEP, Phase.EXIT),
)
"""Phases in their order after the same last step."""

STORAGE_TRIES = 3 * LONGEST_PAUSE
"""Seconds within which a rank that waits for storage tries again, which counts as progress."""

GROWTH = 5.0
"""Factor by which a standstill must exceed one that was ended as a hang after the same step, where
a rank may have been at work."""

LOG_EVERY = 300.0
"""Seconds between two log lines that say that a rank is at work."""

NAMED = 10
"""Ranks that a sentence names at most."""

_Places: TypeAlias = dict[int, tuple[int, Phase, int]]


class HangDetector:
    """Finds a standstill of all ranks: none completes a step, enters another phase, or retries
    storage. Retries are ended by the rank's own time limit.

    The limit is learned from the run: `patience` is the configured multiple of the 95th percentile
    of the phase's duration (for a step: of the time between two), at least the configured minimum
    and at most the phase's maximum, which alone counts where nothing was learned. Ranks that
    `must_report` hang if they never do. For a program that never connects, whose steps are read
    from files, only the maximum counts: what it does between two steps is not known.

    A user's own program may also be at work between two steps, see `_own_limit`; `hung` has the
    longest standstill that was ended as a hang while a rank may have been at work, by step."""

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
        self._worked_at = self._logged_at = -inf

    def check(self, snapshot: Snapshot) -> Sequence[Hang | LongWork]:
        places = {rank: (r.step, r.phase, r.moves.tries) for rank, r in snapshot.reports.items()}
        if snapshot.around.unstarted:
            self._still = Standstill(places, snapshot.now)
        self._still = self._still.seen(places, snapshot.now)
        known = snapshot.usual if self._must_report or snapshot.joined else {}
        moves = {rank: report.moves.stacks for rank, report in snapshot.reports.items()}
        self._stacks = self._stacks.seen(moves, snapshot.now)
        if works_unseen(snapshot):
            self._worked_at = snapshot.now
        still, (limit, phase) = self._still.seconds(snapshot.now), self.patience(known)
        usual_limit = limit
        if not self._must_report and snapshot.joined:
            limit = self._own_limit(snapshot, limit)
        if any(report.storage for report in snapshot.reports.values()):
            limit = max(limit, STORAGE_TRIES)
        if not places and not self._must_report:
            return self._silent_hang(snapshot)
        if still <= usual_limit:
            self._logged_at = -inf
            return ()
        if still <= limit:
            return self._long_work(snapshot, still, limit)
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

    def _silent_hang(self, snapshot: Snapshot) -> Sequence[Hang]:
        """A hang of a program that does not report: all its ranks are idle, as the kernel counts
        it.

        Ranks that do not poll either have the limit of a phase without statistics, or a longer one
        after a false alarm; ranks that poll have the limit of a rank at work.
        """
        ended = snapshot.around.ended
        seen = {n: how for n, how in snapshot.around.still.items() if n not in ended}
        if not seen or len(seen) + len(ended) < snapshot.size:
            return ()
        still = min(how.still for how in seen.values())
        idle = min(how.idle for how in seen.values())
        section = self._section
        at_work = section.hang_timeout_at_work
        limit = max(section.hang_timeout_max, min(at_work, GROWTH * self._hung.get(0, 0.0)))
        if still <= limit and idle <= max(limit, at_work):
            return ()
        sentence = f"no rank has used a processor or moved data for {idle:.0f} s"
        return (Hang(sentence, None, Phase.START, idle, silent=True),)

    def patience(self, usual: PhaseDurations) -> tuple[float, Phase]:
        """The longest limit in seconds of the phases that ranks are in, and its phase."""
        section, limits = self._section, list[tuple[float, Phase]]()
        for phase in {phase for _, phase, _ in self._still.place.values()} or {Phase.START}:
            ceiling = getattr(section.hang_timeout_max_of, phase) or section.hang_timeout_max
            long = section.hang_factor * usual[phase].long if phase in usual else None
            limits.append((patience(section.hang_timeout_min, ceiling, long), phase))
        return max(limits)

    def _own_limit(self, snapshot: Snapshot, limit: float) -> float:
        """The limit in seconds for a user's own program, by its stacks.

        An evaluation has a limit only if one is configured for it, or if all ranks wait in
        collectives. As long as a rank is at work, by its stack, CPU or I/O, the limit is at least
        `hang_timeout_at_work`."""
        phases = {report.phase for report in snapshot.reports.values()}
        moving = self._moving(snapshot.now)
        if Phase.EVAL in phases and self._section.hang_timeout_max_of.eval is None:
            evaluates = (
                report.phase is Phase.EVAL and not report.waiting and rank not in snapshot.silent
                for rank, report in snapshot.reports.items()
            )
            if moving or any(evaluates):
                return inf
        if moving:
            limit = max(limit, self._section.hang_timeout_at_work)
        step = max((report.step for report in snapshot.reports.values()), default=0)
        most = max(self._section.hang_timeout_max, GROWTH**2 * self._section.hang_timeout_min)
        return max(limit, min(most, GROWTH * self._hung.get(step, 0.0)))

    def _moving(self, now: float) -> bool:
        """Whether a rank of a user's own program was at work a moment ago."""
        since = min(self._stacks.seconds(now), now - self._worked_at)
        return since <= self._section.hang_timeout_min

    def _long_work(self, snapshot: Snapshot, still: float, limit: float) -> Sequence[LongWork]:
        """A rank that works for longer than ranks may wait, every `LOG_EVERY` seconds."""
        if limit == inf or not self._moving(snapshot.now):
            self._logged_at = -inf
            return ()
        if snapshot.now - self._logged_at < LOG_EVERY:
            return ()
        self._logged_at = snapshot.now
        at_work = [rank for rank, report in snapshot.reports.items() if not report.waiting]
        if not at_work:
            return ()
        line, waiting = snapshot.reports[at_work[0]].line, len(snapshot.reports) - len(at_work)
        return (LongWork(at_work[0], line, still, limit, waiting),)


def works_unseen(snapshot: Snapshot) -> list[int]:
    """The ranks that are at work as observed from outside, whatever they report: in a child process
    or another thread, in native code that holds the GIL, or before they have connected. Ranks that
    wait for others do not count, whatever their other threads do."""
    works = {rank for rank, how in snapshot.around.still.items() if how.works}
    works -= snapshot.around.ended
    return sorted(rank for rank in works if not waits_for_others(snapshot, rank))


def waits_for_others(snapshot: Snapshot, rank: int) -> bool:
    report = snapshot.reports.get(rank)
    if report is None or rank in snapshot.silent:
        return False
    collective = report.waiting or report.collectives.under_way
    return bool(collective) or report.phase is Phase.RENDEZVOUS


def _distinct_digits(longer: float, shorter: float) -> tuple[str, str]:
    """Two numbers with as few digits as show that they differ."""
    for digits in range(3):
        if f"{longer:.{digits}f}" != f"{shorter:.{digits}f}":
            break
    return f"{longer:.{digits}f}", f"{shorter:.{digits}f}"


def silent_from_the_start(snapshot: Snapshot) -> list[int]:
    """The ranks that have not connected in this attempt: their tasks may never have started."""
    known = snapshot.reports.keys() | snapshot.joined.keys()
    return [rank for rank in range(snapshot.size) if rank not in known]


def _listed(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} has"
    more = f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:NAMED]))}{more} have"


def behind_all_others(snapshot: Snapshot) -> int | None:
    """The rank that the others wait for; None if unknown.

    It is the only silent one; else the only one that is a step or phase behind; else, of those
    behind, the only one that does not wait for others."""
    if len(snapshot.silent) == 1:
        return next(iter(snapshot.silent))
    reports = snapshot.reports
    places = {rank: (r.step, _ORDER.index(r.phase)) for rank, r in reports.items()}
    last = [rank for rank, place in places.items() if place == min(places.values())]
    if len(last) > 1:
        last = [rank for rank in last if not reports[rank].waiting]
    return last[0] if len(last) == 1 < len(places) else None


EVIDENCE, NODES_ANSWER = 3.0, 12.0
"""Seconds that ranks, and nodes at most, have to report evidence before the ranks are killed."""

PLACES_NAMED = 4
"""Places that a sentence names at most."""


class HangEvidence:
    """Collects evidence of a hang from ranks and nodes, and records it.

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
        """The hang, in the end with the evidence."""

    def collect(self, hang: Hang, snapshot: Snapshot) -> None:
        """Ask the ranks for their stacks, and look at processes that may be stuck."""
        self.hang, self._began = hang, snapshot.now
        self._tell(DumpStacks())
        self._look = ProcessLook(processes_to_look_at(hang, snapshot), self._ask)

    def complete(self, snapshot: Snapshot) -> bool:
        if self.hang is None or snapshot.now - self._began <= EVIDENCE or not self._look.complete:
            return False
        seen, ended = snapshot.around.still, snapshot.around.ended
        return bool(self.hang.deadlock) or all(
            rank in self._places or how.place is not None or rank in ended
            for rank, how in seen.items()
        )

    def hear(self, rank: int, event: ConnectionsStalled | StandsAt) -> None:
        """A rank says which of its node's connections deliver nothing, by their addresses; or where
        its program stands."""
        if isinstance(event, ConnectionsStalled):
            self._stalled[rank] = event.ends
        else:
            self._places[rank] = CodePlace(event.line, event.collective)

    def close(self, snapshot: Snapshot) -> None:
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
        at, stands = self._all_places(snapshot), None
        if (at or hang.silent) and not hang.deadlock:
            busy = may_be_at_work(at, snapshot.reports, hang.laggard)
            places = {str(rank): place.words for rank, place in sorted(at.items())}
            step = max((report.step for report in snapshot.reports.values()), default=0)
            stands = OwnProgramStands(step, places, 0 if hang.silent else busy)
            where = f"; {_say_places(at, busy)}" if places else ""
            hang = replace(hang, sentence=hang.sentence + where)
        self.hang = hang
        logger().warning(hang.sentence)
        waiting, processes = by_what_they_wait_for(snapshot.reports), tuple(self._look.lines)
        evidence = snapshot.now - self._began
        still = round(hang.still + evidence, 1)
        fields = (hang.sentence, hang.laggard, waiting, processes, still, round(evidence, 1))
        self._ledger.record(HangFound(*fields, stands), self._attempt)

    def _all_places(self, snapshot: Snapshot) -> dict[int, CodePlace]:
        """Where ranks stand, as they report or else as seen from outside. Native code, such as that
        of a backward pass, may wait in a collective that is in no Python frame."""
        seen = {r: how.place for r, how in snapshot.around.still.items() if how.place}
        found = {r: at for r, at in {**seen, **self._places}.items() if at.line or at.collective}
        for rank, at in found.items():
            report = snapshot.reports.get(rank)
            if report is not None and not at.collective and report.collectives.under_way:
                found[rank] = replace(at, collective=report.collectives.under_way[0].operation)
        return found


def may_be_at_work(
    places: Mapping[int, CodePlace], reports: Mapping[int, Report], laggard: int | None = None
) -> int | None:
    """The rank that may be at work between two steps: the laggard, or the first that waits in no
    collective. None if all wait, or if they are not in a step."""
    for rank, place in sorted(places.items(), key=lambda item: (item[0] != laggard, item[0])):
        report = reports.get(rank)
        in_step = report is not None and report.phase in (Phase.STEP, Phase.COMPILE)
        if in_step and report is not None and not (place.collective or report.waiting):
            return rank
    return None


def _say_places(places: Mapping[int, CodePlace], busy: int | None) -> str:
    """Each place with its first rank, and what to do if the rank was at work."""
    first: dict[str, int] = {}
    for rank, place in sorted(places.items()):
        first.setdefault(place.words, rank)
    sentence = ", ".join(
        f"rank {rank} is {words}" for words, rank in list(first.items())[:PLACES_NAMED]
    )
    if busy is None:
        return sentence
    return f"{sentence}; if rank {busy} was at work there, put that into `with steps.evaluation():`"


def processes_to_look_at(hang: Hang, snapshot: Snapshot) -> dict[str, list[int]]:
    """Processes to look at from outside, by host: all on this host; elsewhere those of silent ranks
    and of the laggard, or all if there is no laggard."""
    found: defaultdict[str, list[int]] = defaultdict(list)
    for rank, there in sorted(snapshot.joined.items()):
        silent = rank not in snapshot.reports or rank in snapshot.silent
        if silent or hang.laggard in (rank, None) or is_here(there.host):
            found[there.host].append(there.pid)
    return dict(found)


def by_what_they_wait_for(reports: Mapping[int, Report]) -> dict[str, list[int]]:
    """Ranks by the collective that they wait in; those that wait in none under "nothing"."""
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
    return {rank for rank, host in hosts.items() if host == node}
