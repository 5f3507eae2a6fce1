"""The first failure as a pure function of a scan's findings.

A failure is attributed to the rank that failed first, which is seldom the one that complains.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from kempner.insight.triage.ends import describe_status
from kempner.insight.triage.log.lines import LogLine
from kempner.insight.triage.places import same_node
from kempner.insight.triage.rules import SignLevel, Sure
from kempner.insight.triage.scan import SHOWN, SURVIVED, About, LogFinding, Scan
from kempner.insight.triage.table.everything import CAUSES
from kempner.run.output.units import spans

_OF_SLURM = ("srun: ", "slurmstepd: ")  # lines about the whole step, unless they name a node
WAITS = {"nccl_timeout", "gloo_timeout"}  # of ranks that waited for another
_FELT_AS = {
    "host_out_of_memory": ("loader_worker_died",),
    **dict.fromkeys(
        ("gpu_lost", "gpu_memory_error", "gpu_link"), ("cuda_failure", "illegal_memory_access")
    ),
}
"""Causes by which the affected rank reports what the kernel or driver reports without a rank."""

_OF_AN_ENVIRONMENT = {"import_error", "binary_mismatch"}
"""Causes in the environment of all ranks: if each rank fails of it, none failed first."""

ABORTED = -6  # SIGABRT: how torch's watchdog ends a rank that lost another


def in_order(finding: LogFinding, among: Iterable[LogFinding], by_time: bool) -> tuple[float, int]:
    """A sort key: the time, if each has one and several files or torchrun's blocks are compared;
    else the line."""
    times = [other.line.time for other in among]
    comparable = by_time or all(other.status is not None for other in among)
    if comparable and None not in times and finding.line.time is not None:
        return finding.line.time, finding.order
    return 0.0, finding.order


def find_failure(
    scan: Scan, fatal: Sequence[LogFinding], first: LogFinding, same: Sequence[LogFinding]
) -> tuple[int | None, str | None, tuple[str, ...]]:
    """The rank and node that failed first, and notes on how they were found."""
    if first.cause.ends_from_outside:
        return None, None, ()
    if first.about.everywhere:
        return None, first.node, ()
    if first.cause.name in WAITS:
        return _missing(scan, fatal)
    if first.cause.name == "peer_lost" and (end := _end_of_another(fatal)) is not None:
        return end.ranks[0], end.node, (f"rank {end.ranks[0]} ended, and reports no other rank",)
    if first.cause.name in _OF_AN_ENVIRONMENT and (count := _all_failed_alike(scan, same)):
        return None, scan.places.only_node, (f"all {count} ranks failed so",)
    ended = [f for f in fatal if f.status is not None and f.ranks and f.level < SignLevel.CASCADE]
    rank = first.ranks[0] if first.ranks else _rank_of_end(first, same, ended)
    if rank is None and first.cause.name in _FELT_AS:
        felt = _FELT_AS[first.cause.name]
        lost = {rank for f in fatal if f.cause.name in felt for rank in f.ranks}
        rank = lost.pop() if len(lost) == 1 else None
    node = first.node
    if node is None and rank is not None:
        node = scan.places.nodes.get(rank)
    if node is None:
        node = next((f.node for f in same if f.node is not None), None)
    if node is None and not first.line.text.startswith(_OF_SLURM):
        node = scan.places.only_node
    return rank, node, ()


def _all_failed_alike(scan: Scan, same: Iterable[LogFinding]) -> int:
    """The number of ranks, if there are several and each has failed of the same cause; else 0."""
    count = scan.places.world or scan.places.highest + 1
    failed = {rank for finding in same for rank in finding.ranks}
    return count if count > 1 and len(failed) == count else 0


def _missing(
    scan: Scan, fatal: Sequence[LogFinding]
) -> tuple[int | None, str | None, tuple[str, ...]]:
    missing, end = scan.collectives.missing(scan.places.world), _end_of_another(fatal)
    if missing is not None:
        nodes = {scan.places.nodes.get(rank) for rank in missing.ranks}
        node = nodes.pop() if len(nodes) == 1 else None
        several = len(missing.ranks) > 1
        who = f"rank{'s' if several else ''} {spans(missing.ranks[:64])}"
        rank = missing.ranks[0] if not several or node is not None else None
        return rank, node, (f"{who} did not come: {missing.why}",)
    if end is not None:
        return end.ranks[0], end.node, (f"rank {end.ranks[0]} ended, and reports no other rank",)
    return None, None, ("which rank did not come cannot be told from this log",)


def _end_of_another(fatal: Sequence[LogFinding]) -> LogFinding | None:
    """The first exit of a rank that does not complain of others, unless it aborted."""
    complained = {f.line.rank for f in fatal if f.level is SignLevel.SYMPTOM and f.status is None}
    ends = [
        finding
        for finding in fatal
        if finding.status not in (None, ABORTED)
        and finding.level < SignLevel.CASCADE
        and finding.ranks
    ]
    others = [finding for finding in ends if not complained.intersection(finding.ranks)]
    if complained <= {None} or not others:
        return None
    return min(others, key=lambda finding: in_order(finding, others, by_time=True))


def _rank_of_end(
    first: LogFinding, same: Sequence[LogFinding], ended: Sequence[LogFinding]
) -> int | None:
    """The rank whose process ended first, where the line itself names none."""
    named = [finding for finding in same if finding.ranks]
    if named and first.level is SignLevel.GIVEN:
        return named[0].ranks[0]
    if first.level >= SignLevel.SYMPTOM and first.status is None:
        return None  # who complains is not who failed
    if first.cause.name == "node_failure":
        return None
    on_node = [f for f in ended if first.node is None or same_node(f.node, first.node)]
    local = first.line.local_rank
    if local is not None and first.line.rank is None:
        on_node = [f for f in on_node if f.line.local_rank in (None, local)]
    if not on_node:
        return named[0].ranks[0] if named else None
    alike = [f for f in on_node if f.cause is first.cause and f.level is SignLevel.MECHANISM]
    roots = _by_themselves(alike or on_node)
    return min(roots, key=lambda f: in_order(f, roots, by_time=True)).ranks[0]


def _by_themselves(ended: Sequence[LogFinding]) -> list[LogFinding]:
    """The ends that torchrun saw first, if any, without ranks that aborted, as ranks do that lost
    another."""
    others = [finding for finding in ended if finding.status != ABORTED] or list(ended)
    return [finding for finding in others if finding.about.first] or others


UNKNOWN = "unknown"  # the cause of what no rule knows

_UNEXPLAINED = {"exit_code", "aborted", "cascade", "terminated"}
"""Exits that do not tell their cause."""

_NETWORK = {
    *WAITS,
    *("nccl_error", "nccl_init_timeout", "peer_lost", "rendezvous_timeout", "unreachable"),
}
"""Causes that an interface without a route to the other nodes may explain."""


_NOT_FINITE = re.compile(r"(?i)\b(?:nans?|infs?|(?:non-?|not |in)finite)\b|converge|singular")
"""Messages of code that received numbers that are not finite."""

_TOLD_TO_END = re.compile(r"(?i)SIGTERM|SIGUSR|SIGCONT|signal 1\d|signal: Terminated")

PASSED_BY = 50
"""Lines without a failure after which an earlier one did not end the job."""

GRACE = 120.0  # seconds after a scheduler's signal in which failures follow from it


@dataclass(frozen=True)
class Evidence:
    """A line of a log: `place` is `file:line`."""

    place: str
    text: str


@dataclass(frozen=True)
class FailureLocation:
    """The rank that failed first, and its node; all ranks and nodes that failed with that cause."""

    rank: int | None = None
    node: str | None = None
    ranks: tuple[int, ...] = ()
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class FirstError:
    """The first exception or message (`raised`), the user's line of code (`frame`), and the log
    lines that show it."""

    raised: str = ""
    frame: str = ""
    evidence: tuple[Evidence, ...] = ()


@dataclass(frozen=True)
class Verdict:
    """What failed first, where, why, and what to do; None and empty where that is not known.

    `cause` names a row of the table, or is UNKNOWN; then the evidence is the most likely lines.
    `consequences` are sentences about the other ranks.
    """

    cause: str
    says: str
    do: str
    sure: Sure
    where: FailureLocation = FailureLocation()
    first_error: FirstError = FirstError()
    consequences: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def known(self) -> bool:
        return self.cause != UNKNOWN

    @property
    def rank(self) -> int | None:
        return self.where.rank

    @property
    def node(self) -> str | None:
        return self.where.node

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        return self.first_error.evidence

    def to_json(self) -> dict[str, Any]:
        fields = asdict(self)
        where, first_error = fields.pop("where"), fields.pop("first_error")
        return {**fields, "sure": self.sure.label, **where, **first_error}


def decide(scan: Scan) -> Verdict:
    """The earliest finding of the lowest level."""
    scan.places.place_tasks()
    found = [_placed(finding, scan) for finding in scan.findings]
    fatal = [finding for finding in found if _steps_after(scan, finding) < SURVIVED]
    fatal = _without_doubtful(_without_passed_by(scan, fatal))
    fatal = _without_late_ends(_without_aftermath(fatal))
    by_time = len(scan.sources) > 1
    first = _first(fatal, by_time)
    if first is None or first.cause.name in _UNEXPLAINED:
        return _unknown(scan, fatal, first)
    return _known(scan, fatal, _behind(scan, fatal, first))


def _behind(scan: Scan, fatal: Sequence[LogFinding], first: LogFinding) -> LogFinding:
    """The first failure, or what explains it in the log."""
    lonely = scan.places.isolated_interface
    if first.cause.name in _NETWORK and scan.steps.made < SURVIVED and lonely is not None:
        failed = [f for f in fatal if f.cause.name in _NETWORK - WAITS]
        nodes = {f.node or f.line.node for f in failed} - {None}
        about = About(node=nodes.pop() if len(nodes) == 1 else None, everywhere=True)
        return _explained(first, "wrong_interface", lonely, about)
    lost = scan.losses.since if scan.losses.lost and first.order >= scan.losses.order else None
    if lost is not None and (
        first.cause.name == "device_assert"
        or (first.cause.name == "exception" and _NOT_FINITE.search(first.line.text))
    ):
        return _explained(
            first, "loss_not_finite", lost, About(frame=first.about.frame, everywhere=True)
        )
    return first


def _explained(first: LogFinding, cause: str, line: LogLine, about: About) -> LogFinding:
    return replace(first, cause=CAUSES[cause], sure=Sure.LIKELY, line=line, about=about)


def _steps_after(scan: Scan, finding: LogFinding) -> int:
    """Steps after a finding in its own file: another file may be another node's."""
    source = finding.line.place.rpartition(":")[0]
    return scan.steps.by_file.get(source, scan.steps.made) - finding.steps


def _placed(finding: LogFinding, scan: Scan) -> LogFinding:
    """The finding with its rank or node, where the other tells it."""
    about = finding.about
    if about.task and not scan.places.tasks:
        about = replace(about, ranks=())
    if not about.ranks and about.pid is not None:
        rank = scan.places.rank_of(about.pid, about.node)
        about = about if rank is None else replace(about, ranks=(rank,))
    local = finding.line.local_rank
    if not about.ranks and local is not None and finding.line.rank is None:
        rank = scan.places.rank_of_local(local, about.node or finding.line.node)
        about = about if rank is None else replace(about, ranks=(rank,))
    if about.node is None and about.ranks:
        about = replace(about, node=scan.places.nodes.get(about.ranks[0]))
    return replace(finding, about=about)


def _without_passed_by(scan: Scan, found: Sequence[LogFinding]) -> list[LogFinding]:
    """Without mentioned failures that were followed by many lines without any."""
    last = max((finding.order for finding in found), default=0)
    if len(scan.sources) > 1 or scan.lines - last <= PASSED_BY:
        return list(found)
    return [
        f for f in found if f.level is not SignLevel.CAUSE or f.about.frame or f.status is not None
    ]


def _without_doubtful(found: Sequence[LogFinding]) -> list[LogFinding]:
    """Without failures that may have been handled, if another explains the end, or none does."""
    certain = [finding for finding in found if not finding.doubtful]
    if any(f.level < SignLevel.SYMPTOM for f in certain):
        return certain
    last = max((finding.order for finding in certain), default=0)
    return [f for f in found if not f.doubtful or f.order < last <= f.order + PASSED_BY]


def _without_aftermath(found: Sequence[LogFinding]) -> list[LogFinding]:
    """Without exceptions of ranks that had complained of another rank before."""
    complained: set[object] = set()
    kept = []
    for finding in found:
        writer = finding.line.rank
        if finding.cause.name == "exception" and writer is not None and writer in complained:
            continue
        if finding.level is SignLevel.SYMPTOM and finding.status is None:
            complained.add(writer)
        kept.append(finding)
    return kept


def _without_late_ends(found: Sequence[LogFinding]) -> list[LogFinding]:
    """Without ends from outside, such as a time limit, that came after a failure; only these if
    they came first."""
    ends = [finding for finding in found if finding.cause.ends_from_outside]
    if not ends:
        return list(found)
    cascades = [f for f in found if f.cause.name == "cascade" and _TOLD_TO_END.search(f.line.text)]
    begins = min(finding.order for finding in [*ends, *cascades])
    earlier = [
        finding
        for finding in found
        if not finding.cause.ends_from_outside
        and finding.level < SignLevel.CASCADE
        and (finding.order < begins or finding.level is SignLevel.GIVEN)
        and finding.cause.name not in _UNEXPLAINED
        and not any(_just_after(finding, end) for end in ends)
    ]
    return earlier or [
        f for f in found if f.cause.ends_from_outside or f.level is SignLevel.CASCADE
    ]


def _just_after(finding: LogFinding, end: LogFinding) -> bool:
    """Whether a finding came within the grace period after `end`, by their clocks."""
    return finding.level is not SignLevel.GIVEN and 0 <= _seconds_after(finding, end) <= GRACE


def _seconds_after(finding: LogFinding, other: LogFinding) -> float:
    """The difference of their times; NaN if one has none."""
    if finding.line.time is None or other.line.time is None:
        return math.nan
    return finding.line.time - other.line.time


def _first(found: Sequence[LogFinding], by_time: bool) -> LogFinding | None:
    if not found:
        return None
    level = min(finding.level for finding in found)
    nearest = [finding for finding in found if finding.level is level]
    explained = [finding for finding in nearest if finding.cause.name not in _UNEXPLAINED]
    return min(explained or nearest, key=lambda finding: in_order(finding, nearest, by_time))


def _known(scan: Scan, fatal: Sequence[LogFinding], first: LogFinding) -> Verdict:
    same = [finding for finding in fatal if finding.cause is first.cause]
    rank, node, notes = find_failure(scan, fatal, first, same)
    ranks = sorted({number for finding in same for number in finding.ranks})
    nodes = list(dict.fromkeys(finding.node for finding in same if finding.node is not None))
    known = len(scan.places.seen)
    if len(nodes) == 1 and known > 1:
        notes += (f"only on {nodes[0]}, of {known} nodes that this log speaks of",)
    others = [finding for finding in fatal if finding.cause is not first.cause]
    ends = [f for f in fatal if f.status is not None and (rank is None or rank in f.ranks)]
    shown = [finding.line for finding in (first, *same, *ends)]
    return Verdict(
        first.cause.name,
        first.cause.says,
        first.cause.do,
        min(first.sure, Sure.LIKELY) if _is_thin(fatal, first, rank) else first.sure,
        FailureLocation(rank, node, tuple(ranks), tuple(nodes)),
        FirstError(
            first.line.text.strip(),
            next((f.about.frame for f in [first, *same] if f.about.frame), ""),
            tuple(map(_quoted, list(dict.fromkeys(shown))[:5])),
        ),
        tuple(_consequences(others, [*ranks, *(() if rank is None else (rank,))])),
        (*notes, *_remarks(scan)),
    )


def _quoted(line: LogLine) -> Evidence:
    text = line.text.strip()
    return Evidence(line.place, text if len(text) < 300 else text[:297] + "...")


def _consequences(others: Sequence[LogFinding], first: Iterable[int]) -> Iterable[str]:
    """One sentence for each kind of exit or complaint of ranks other than `first`."""
    failed = set(first)
    for name in dict.fromkeys(finding.cause.name for finding in others):
        same = [finding for finding in others if finding.cause.name == name]
        found_ranks = {rank for f in same for rank in f.ranks or (f.line.rank,) if rank is not None}
        ranks = sorted(found_ranks - failed)
        statuses = sorted({finding.status for finding in same if finding.status is not None})
        if name == "cascade" or not ranks:
            continue
        how = (
            ", ".join(map(describe_status, statuses))
            if statuses
            else f"{same[0].cause.says} ({name})"
        )
        yield f"rank{'s' if ranks[1:] else ''} {spans(ranks)}: {how}"


def _is_thin(fatal: Sequence[LogFinding], first: LogFinding, rank: int | None) -> bool:
    """Whether the evidence is thin: only a symptom, or other ranks report other causes at the same
    time, so that only the order of lines says which was first."""
    rivals = [
        finding
        for finding in fatal
        if finding.level == first.level and finding.cause is not first.cause
        if finding.ranks and rank not in finding.ranks and finding.status is None
        if not _seconds_after(finding, first) > 1.0
    ]
    if first.cause.name == "exception":
        crashed = (f for f in fatal if f.status is not None and f.level is SignLevel.MECHANISM)
        rivals += [finding for finding in crashed if finding.ranks and rank not in finding.ranks]
    rivalled = rank is not None and bool(rivals) and first.level is not SignLevel.GIVEN
    return first.level >= SignLevel.SYMPTOM or rivalled or first.doubtful


def _remarks(scan: Scan) -> Iterator[str]:
    """Notes on a loss that is not finite at the end, and on NCCL over sockets."""
    since = scan.losses.since
    if since is not None and scan.losses.lost:
        yield f"the loss is no finite number since {since.place}"
    table = scan.transports.table(scan.places)
    if slow := [rank for rank, net in table.items() if net == "Socket"]:
        yield (
            f"NCCL talks over plain sockets (NET/Socket) on ranks {spans(slow)} of {len(table)} "
            "that say so: check InfiniBand there, and NCCL_IB_DISABLE, NCCL_IB_HCA"
        )


def _unknown(scan: Scan, fatal: Sequence[LogFinding], first: LogFinding | None) -> Verdict:
    ended = [f for f in fatal if f.status is not None and f.level < SignLevel.CASCADE]
    rank = node = None
    says = "no rule knows what is in this log" if scan.suspects.first else "no sign of a failure"
    do = "look at the lines below, and at the logs of the ranks that are not here"
    if ended:
        root = [finding for finding in ended if finding.about.first] or ended
        end = min(root, key=lambda f: in_order(f, root, by_time=True))
        rank, node = (end.ranks[0] if end.ranks else None), end.node
        says = f"a process ended with {describe_status(end.status or 0)}, and does not say why"
    elif first is not None:
        says, do = first.cause.says, first.cause.do
    lines = [*scan.suspects.last] or [*scan.suspects.ending]  # the last that speak of errors
    return Verdict(
        UNKNOWN,
        says,
        do,
        Sure.UNKNOWN,
        FailureLocation(rank, node or (scan.places.only_node if rank is not None else None)),
        FirstError(evidence=tuple(map(_quoted, lines[-SHOWN // 2 :]))),
        consequences=tuple(_consequences(fatal, () if rank is None else (rank,))),
        notes=tuple(_remarks(scan)),
    )
