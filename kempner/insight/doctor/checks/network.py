"""Interfaces and ports."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from kempner.cluster.network.interfaces import Network, disagreement
from kempner.insight.doctor.facts.node import NodeAnswer
from kempner.insight.doctor.finding import (
    Finding,
    Outcome,
    fail,
    finding,
    passed,
    per_node,
    skipped,
    warn,
)


@dataclass(frozen=True)
class PortFacts:
    """supervise.control_ports: the range as written, and how many of it are free here; None for
    any port."""

    wanted: str | None
    free: int = 0


def check_interfaces(answers: Sequence[NodeAnswer]) -> list[Finding]:
    """Whether each node has the interface that its ranks bind to, and all are on one network."""
    several = len(answers) > 1
    found = per_node("interface", answers, lambda a: a.node, lambda a: _interface(a, several))
    odd = disagreement({answer.node: answer.network.interface for answer in answers})
    usable = not any(answer.network.trouble for answer in answers)
    return [*found, finding("interface", fail(odd))] if odd and usable else found


def _interface(answer: NodeAnswer, several: bool) -> Outcome:
    network = answer.network
    bound = network.interface
    if network.trouble:
        return fail(f"{network.trouble}: correct the name, or bring the interface up")
    if network.unreachable:
        return fail(
            f"{network.unreachable}: look for a firewall or a broken link, or set "
            "distributed.interface"
        )
    if network.warning:
        return warn(f"{network.warning}; set distributed.interface if another one is faster")
    if several and bound is not None and bound.network is Network.LOOPBACK:
        return fail(
            f"{bound.name} leads to no other node: set distributed.interface to one that does, or "
            "leave it out"
        )
    if bound is None:
        return skipped("no interface is chosen: Gloo binds to the host's name")
    return passed(f"{bound.name} is up and has an address")


def check_ports(facts: PortFacts, in_job: bool) -> Outcome:
    """Whether the supervisor finds free ports to listen on: one for the ranks, and in a Slurm job
    another one for the agents of its nodes."""
    if facts.wanted is None:
        return passed("supervise.control_ports is not set: any free port will do")
    if not facts.free:
        return fail(
            f'no port of supervise.control_ports="{facts.wanted}" is free on this host: end what '
            "listens there, or set another range"
        )
    if in_job and facts.free == 1:
        return warn(
            f'one port of supervise.control_ports="{facts.wanted}" is free on this host, and the '
            "agents of the nodes need a second one: set a larger range"
        )
    return passed(f'{facts.free} of supervise.control_ports="{facts.wanted}" are free')
