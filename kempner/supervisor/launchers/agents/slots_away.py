"""The steps that agents hold in memory, and the pairs of nodes that keep copies for each other."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Protocol

from kempner.checkpoint.slots.pour import Offer, Poured
from kempner.checkpoint.slots.requests import listening, offers_of, poured_by
from kempner.run.control.launch_env import BUDDY, BuddyTerms
from kempner.run.output.logs import logger
from kempner.supervisor.launchers.agents.buddy.sender import Buddy


class AskAgents(Protocol):
    """Sends requests to nodes and returns their replies, as texts by node: those that arrive soon,
    or, if `patient`, those of all nodes that can still reply."""

    def __call__(self, texts: Mapping[str, str], patient: bool) -> Mapping[str, str]: ...


class SlotsAway:
    """Asks agents for what they hold."""

    def __init__(self, ask: AskAgents) -> None:
        self._now, self._patiently = partial(ask, patient=False), partial(ask, patient=True)
        self._offered: dict[str, tuple[Offer, ...]] = {}

    def pair(self, nodes: Sequence[str], terms: BuddyTerms | None) -> dict[str, dict[str, str]]:
        """The variable that tells each node where its buddy listens; none for all where one of them
        has none."""
        if terms is None:
            return {}
        if len(nodes) < 2:
            logger().info("no copies of steps in memory: there is no other node")
            return {}
        try:
            found = listening(self._now, nodes, terms.interface or "")
        except OSError as error:
            logger().warning("no copies of steps in memory", reason=error.strerror)
            return {}
        if unresponsive := [node for node in nodes if node not in found]:
            logger().warning(
                "no copies of steps in memory: agents do not answer", nodes=unresponsive
            )
            return {}
        pairs = buddies(nodes)
        logger().info("nodes keep copies of each other's steps", pairs=pairs)
        return {
            node: {BUDDY: Buddy(*found[buddy], terms.share).text} for node, buddy in pairs.items()
        }

    def offers(self, nodes: Collection[str], nonce: str) -> list[Offer]:
        """What these nodes offer. Raises `OSError`."""
        self._offered = offers_of(self._now, nodes, nonce)
        return [offer for told in self._offered.values() for offer in told]

    def pour(self, nonce: str, step: int, folder: Path) -> list[Poured]:
        """Have them write what they have offered of a step. Raises `OSError`."""
        return poured_by(self._patiently, self._offered, nonce, step, folder)


def buddies(nodes: Sequence[str]) -> Mapping[str, str]:
    """The node that keeps copies for each node: one that is far off in Slurm's order, in which
    neighbours often share a switch or a power supply."""
    half = len(nodes) // 2
    return {node: nodes[(at + half) % len(nodes)] for at, node in enumerate(nodes)}
