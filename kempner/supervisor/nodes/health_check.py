"""Judges the nodes' health by what their probes measured: pure functions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kempner.cluster.machine.limits import (
    MEMORY,
    ROOM,
    SKEW,
    clock_skew,
    open_files_needed,
)
from kempner.cluster.network.interfaces import nodes_off_network
from kempner.supervisor.nodes.probe import SITE_CHECK, ProbeResult, other_code

NO_ANSWER = "it does not respond"
"""What is wrong with a node that is gone."""


@dataclass(frozen=True)
class Diagnosis:
    """What the check found. `unfit` says why, by node; `warnings` are true of every node alike, and
    no reason to leave one out. `answered` are the nodes that gave an answer."""

    unfit: Mapping[str, str]
    warnings: tuple[str, ...] = ()
    answered: frozenset[str] = frozenset()


def diagnose(
    nodes: Sequence[str],
    told: Sequence[ProbeResult],
    unseen: Mapping[str, str],
    during: tuple[float, float],
    ranks: int,
) -> Diagnosis:
    """Compare what the `nodes` told, which may be fewer, of a world of `ranks`.

    `unseen` says of some of them why what they wrote cannot be trusted to arrive; `during` is when
    the first was asked and the last had answered, in seconds since the epoch by our own clock.
    """
    if not told:
        return Diagnosis({}, ("the health check did not run on any node",))
    found = {vitals.node: health_problems(vitals, during, ranks) for vitals in told}
    for node, reason in unseen.items():
        found.setdefault(node, {}).setdefault("shared", reason)
    for node in nodes_off_network({vitals.node: vitals.interface for vitals in told}):
        found[node].setdefault("interface", "it has no interface on the network of the other nodes")
    code = {vitals.node: vitals.code for vitals in told if vitals.code is not None}
    for node, reason in other_code(code, nodes[0]).items():
        found[node]["code"] = reason
    for node in nodes:
        found.setdefault(node, {"answer": NO_ANSWER})
    common = set.intersection(*(set(ailment) for ailment in found.values()))
    common.discard(SITE_CHECK)  # the site knows what its nodes must be like
    first = found[nodes[0]]
    unfit = {
        node: "; ".join(words for about, words in its.items() if about not in common)
        for node, its in found.items()
        if set(its) - common
    }
    return Diagnosis(unfit, tuple(first[about] for about in sorted(common)))


def health_problems(vitals: ProbeResult, during: tuple[float, float], ranks: int) -> dict[str, str]:
    """What is wrong with one node, in words, by what it is about."""
    found = dict(vitals.troubles)
    if vitals.memory.free < MEMORY * vitals.memory.total:
        found["memory"] = (
            f"{_mib(vitals.memory.free)} of its {_mib(vitals.memory.total)} memory is free"
        )
    for folder, free in vitals.disk_free.items():
        if free < ROOM:
            found[folder] = f"{folder} has {_mib(free)} left"
    needed = open_files_needed(ranks)
    if vitals.open_files is not None and vitals.open_files < needed:
        found["open files"] = (
            f"a process may open {vitals.open_files} files (`ulimit -Hn`), and a rank of {ranks} "
            f"needs {needed}"
        )
    skew = clock_skew(vitals.time, during)
    if abs(skew) > SKEW:
        found["clock"] = f"its clock is {abs(skew):.0f} s {'ahead' if skew > 0 else 'behind'}"
    return found


def _mib(size: int) -> str:
    return f"{size >> 20} MiB"
