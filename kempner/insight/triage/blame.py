"""Whom a failure is laid to: the rank that failed first, which is seldom who complains."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kempner.insight.triage.findings import Finding
from kempner.insight.triage.places import same_node
from kempner.insight.triage.rules import Level
from kempner.insight.triage.scan import Scan
from kempner.insight.words import spans

_OF_SLURM = ("srun: ", "slurmstepd: ")
"""Whose lines are of the whole step, where they name no node."""

WAITS = {"nccl_timeout", "gloo_timeout"}
"""Ranks that waited for another."""

ABORTED = -6
"""SIGABRT: how torch's watchdog ends a rank that lost another."""


def in_order(finding: Finding, among: Iterable[Finding], by_time: bool) -> tuple[float, int]:
    """By time where each has one and files are compared, or torchrun's blocks; else by line."""
    times = [other.line.time for other in among]
    comparable = by_time or all(other.status is not None for other in among)
    if comparable and None not in times and finding.line.time is not None:
        return finding.line.time, finding.order
    return 0.0, finding.order


def who_failed(
    scan: Scan, fatal: Sequence[Finding], first: Finding, same: Sequence[Finding]
) -> tuple[int | None, str | None, tuple[str, ...]]:
    """The rank and node that failed first, and how that was told."""
    if first.cause.ends_from_outside:
        return None, None, ()
    if first.about.everywhere:
        return None, first.node, ()
    if first.cause.name in WAITS:
        return _missing(scan, fatal)
    if first.cause.name == "peer_lost" and (end := _end_of_another(fatal)) is not None:
        return end.ranks[0], end.node, (f"rank {end.ranks[0]} ended, and complains of nobody",)
    ended = [f for f in fatal if f.status is not None and f.ranks and f.level < Level.CASCADE]
    rank = first.ranks[0] if first.ranks else _rank_of_end(first, same, ended)
    if rank is None and first.cause.name == "host_out_of_memory":
        rank = _whose_worker_died(fatal)
    node = first.node
    if node is None and rank is not None:
        node = scan.places.nodes.get(rank)
    if node is None:
        node = next((f.node for f in same if f.node is not None), None)
    if node is None and not first.line.text.startswith(_OF_SLURM):
        node = scan.places.only_node
    return rank, node, ()


def _missing(
    scan: Scan, fatal: Sequence[Finding]
) -> tuple[int | None, str | None, tuple[str, ...]]:
    """Whom the others waited for in a collective."""
    missing, end = scan.collectives.missing(scan.places.world), _end_of_another(fatal)
    if missing is not None:
        nodes = {scan.places.nodes.get(rank) for rank in missing.ranks}
        node = nodes.pop() if len(nodes) == 1 else None
        several = len(missing.ranks) > 1
        who = f"rank{'s' if several else ''} {spans(missing.ranks[:64])}"
        rank = missing.ranks[0] if not several or node is not None else None
        return rank, node, (f"{who} did not come: {missing.why}",)
    if end is not None:
        return end.ranks[0], end.node, (f"rank {end.ranks[0]} ended, and complains of nobody",)
    return None, None, ("which rank did not come cannot be told from this log",)


def _end_of_another(fatal: Sequence[Finding]) -> Finding | None:
    """The first end of a rank that does not complain of others, if it ended by itself."""
    complained = {f.line.rank for f in fatal if f.level is Level.SYMPTOM and f.status is None}
    ends = [
        finding
        for finding in fatal
        if finding.status not in (None, ABORTED) and finding.level < Level.CASCADE and finding.ranks
    ]
    others = [finding for finding in ends if not complained.intersection(finding.ranks)]
    if complained <= {None} or not others:
        return None
    return min(others, key=lambda finding: in_order(finding, others, by_time=True))


def _rank_of_end(first: Finding, same: Sequence[Finding], ended: Sequence[Finding]) -> int | None:
    """The rank whose process ended first, where the line itself names none."""
    named = [finding for finding in same if finding.ranks]
    if named and first.level is Level.GIVEN:
        return named[0].ranks[0]
    if first.level >= Level.SYMPTOM and first.status is None:
        return None  # who complains is not who failed
    if first.cause.name == "node_failure":
        return None
    on_node = [f for f in ended if first.node is None or same_node(f.node, first.node)]
    local = first.line.local_rank
    if local is not None and first.line.rank is None:
        on_node = [f for f in on_node if f.line.local_rank in (None, local)]
    if not on_node:
        return named[0].ranks[0] if named else None
    roots = _by_themselves(_so_ended(first, on_node) or on_node)
    return min(roots, key=lambda f: in_order(f, roots, by_time=True)).ranks[0]


def _whose_worker_died(fatal: Sequence[Finding]) -> int | None:
    """The only rank that lost a process of its data loader, if one did: the kernel took that."""
    ranks = {rank for f in fatal if f.cause.name == "loader_worker_died" for rank in f.ranks}
    return ranks.pop() if len(ranks) == 1 else None


def _so_ended(first: Finding, ended: Sequence[Finding]) -> list[Finding]:
    """Those that ended in the way that the line speaks of, as by that signal."""
    return [f for f in ended if f.cause is first.cause and f.level is Level.MECHANISM]


def _by_themselves(ended: Sequence[Finding]) -> list[Finding]:
    """Those that torchrun saw first, if there are any; of them those that did not abort themselves,
    as ranks do that lost another."""
    others = [finding for finding in ended if finding.status != ABORTED] or list(ended)
    return [finding for finding in others if finding.about.first] or others
