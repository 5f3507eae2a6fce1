"""The network of a rank, decided on its node: by this one function, however the rank is started."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from kempner.cluster.network.interfaces import (
    Interface,
    InterfaceChoice,
    choose,
    read_interfaces,
    route_address,
)
from kempner.cluster.world import World


def network_of_rank(
    environ: Mapping[str, str],
    world: World,
    configured: str | None,
    master: str,
    interfaces: Sequence[Interface] | None = None,
) -> InterfaceChoice:
    """The interface for a rank that meets the others at `master`, empty if that is not known.

    `configured` is the key distributed.interface, `interfaces` are this node's. Raises `ValueError`
    as `choose`.
    """
    return choose(
        read_interfaces() if interfaces is None else interfaces,
        on_one_node=world.on_one_node,
        configured=configured,
        environ=environ,
        route_address=route_address(master) if master else "",
    )
